"""Inputs that say which of their dimensions are space."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from oracle import assert_same
from space_networks import INPUTS, Inputs, some_inputs
from torch import Tensor, nn

import placer
from placer.executor.boxes import check_boxes
from placer.executor.module import runtime_of


def _spec(space: Any, **fields: Any) -> dict[str, Any]:
    shards = space if isinstance(space, int) else space["shards"]
    return {"devices": [f"cpu:{i}" for i in range(shards)], "space": space, **fields}


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "space", [2, 3, {"shards": 4, "grid": [2, 1, 2]}, {"shards": 4, "grid": [2, 2]}], ids=str
)
def test_of_such_inputs_nothing_is_gathered(space: Any) -> None:
    torch.manual_seed(0)
    for fields in ({}, {"microbatches": 2}):
        placed = assert_same(
            Inputs().double(), _spec(space, inputs=INPUTS, **fields), some_inputs(4)
        )
        assert not any("Gathered" in note for note in placed.plan.notes)


def test_named_dims_are_those_in_the_order_of_space() -> None:
    """Height is dimension 2 of the volume with its channels last; the mask's batch is said, too."""
    inputs: dict[str, Any] = {
        "x": {"space_dims": [2]},
        "mask": {"batch_dim": 0, "space_dims": [2]},
        "coarse": {"space_dims": [3]},
    }
    space = {"shards": 2, "dims": ["height"]}
    placed = assert_same(Inputs().double(), _spec(space, inputs=inputs), some_inputs(4))
    assert not any("Gathered" in note for note in placed.plan.notes)
    assert placed.plan.batch_dims == {"mask": 0}
    given = json.loads(placer.PlacementSpec(**_spec(space, inputs=inputs)).to_json())
    assert given["inputs"] == inputs


class _WithTokens(nn.Module):
    """Tokens come first, and integers are a volume of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.scale = nn.Embedding(3, 4), nn.Conv3d(4, 2, 3), nn.Linear(6, 4)

    def forward(self, tokens: Tensor, classes: Tensor) -> Tensor:
        scale = self.scale(tokens.mean(1))[:, :, None, None, None]
        result: Tensor = self.conv(self.embed(classes).permute(0, 4, 1, 2, 3) * scale)
        return result


def test_an_input_without_space_and_one_of_integers() -> None:
    args = torch.randn(2, 5, 6, dtype=torch.float64), torch.randint(3, (2, 8, 6, 6))
    inputs: dict[str, Any] = {"tokens": {"space_dims": []}, "classes": {"space_dims": [1, 2, 3]}}
    placed = assert_same(_WithTokens().double(), _spec(2, inputs=inputs), args)
    assert not any("Gathered" in note for note in placed.plan.notes)


class _Video(nn.Module):
    """Has frames of volumes, and draws one for a class, which has no space."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.embed = nn.Conv3d(1, 1, 3, padding=1), nn.Embedding(3, 1)

    def draw(self, label: Tensor) -> Tensor:
        found: Tensor = self.conv(self.embed(label)[..., None, None, None].expand(-1, -1, 4, 4, 4))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.conv(frame) for frame in x.unbind(1)], 1)


def test_depth_is_the_third_dimension_from_the_end_and_a_method_without_space_runs_whole() -> None:
    plain, label = _Video().double(), torch.tensor([0, 2])
    frames = torch.randn(2, 3, 1, 8, 4, 4).double()
    placed = assert_same(plain, _spec({"shards": 2, "dims": ["depth"]}), (frames,), steps=1)
    plain.load_state_dict(placed.state_dict())
    torch.testing.assert_close(placed.draw(label), plain.draw(label))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"masc": {"space_dims": [1]}}, "/inputs/masc: .*\n.*did you mean 'mask'"),
        ({"mask": {"space_dims": [4]}}, "/inputs/mask/space_dims: names dim 4, which mask lacks"),
        ({"mask": {"space_dims": [1, 2, -3]}}, "names a dim of mask twice"),
        ({"mask": {"space_dims": [0, 1, 2]}}, "dim 0 of mask has the rows"),
        ({"mask": {"space_dims": [1, 2]}, "x": {"space_dims": [1, 2, 3]}}, "has 2 dims, and x has"),
        ({"coarse": {"space_dims": [1]}}, "coarse has 1 positions in space"),
        ({"mask": {}}, "/inputs/mask: {} was found where 'whole'"),
        ({"mask": {"space_dim": [1]}}, "did you mean 'space_dims'"),
        ({"mask": {"space_dims": "depth"}}, "/inputs/mask/space_dims"),
    ],
)
def test_what_cannot_be_meant_is_refused(inputs: dict[str, Any], said: str) -> None:
    with pytest.raises(placer.SpecError, match=said):
        placer.compile(Inputs().double(), _spec(2, inputs=inputs), some_inputs(2))


def test_boxes_in_one_process_are_whole_inputs() -> None:
    args = some_inputs(2)
    placed = placer.compile(Inputs().double(), _spec(2, inputs=INPUTS), args)
    assert {name: len(own) for name, own in placed.boxes.items()} == {
        "x": 5,
        "mask": 4,
        "coarse": 5,
    }
    given = [
        placer.Box(x[own], x.shape) for x, own in zip(args, placed.boxes.values(), strict=True)
    ]
    for found, own in zip(placed(*given), placed(*args), strict=True):
        assert torch.equal(found, own)
    with pytest.raises(placer.PlacerError, match="one process runs all shards"):
        placed(placer.Box(args[0][:, :4], args[0].shape), *args[1:])


class _Rolled(nn.Module):
    """Reads its size, which a part does not have, and perhaps all of its values."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.conv, self.whole = nn.Conv3d(2, 2, 3, padding=1), whole

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x) / x.shape[2]
        return y + x.roll(1, 2) if self.whole else y


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_of_an_input_that_something_reads_whole_is_refused(whole: bool) -> None:
    x = torch.randn(2, 2, 8, 6, 6)
    staged = runtime_of(placer.compile(_Rolled(whole=whole), _spec(2), x)).staged
    given: dict[str, Any] = {"leaves": [x], "boxes": {0: x[:, :, :4]}, "shard": 0}
    if whole:
        with pytest.raises(placer.PlacerError, match=r"input x: .* but roll reads it whole"):
            check_boxes(staged, **given)
    else:
        check_boxes(staged, **given)


def test_plans_count_own_boxes_of_processes() -> None:
    """A GPU has a copy of its part then, and otherwise one of all the input; one process gets all of it."""
    model, x = nn.Conv3d(16, 2, 3, padding=1), torch.empty(1, 16, 32, 16, 16)
    peaks = {}
    for own in (False, True):
        spec = _spec({"shards": 2, "own_boxes": own}, loss="mean_square")
        spec["devices"] = ["cuda:0", "cuda:1"]
        assert placer.PlacementSpec(**json.loads(placer.PlacementSpec(**spec).to_json()))
        for processes in (False, True):
            plan = placer.make_plan(model, spec, x, processes=processes)
            peaks[own, processes] = max(device.peak for device in plan.devices)
    assert peaks[True, False] == peaks[False, False]
    assert peaks[True, True] <= peaks[False, True] - x.nbytes // 4
