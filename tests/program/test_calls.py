"""What goes into ``forward`` and what comes out of it, in the forms that people use."""

from __future__ import annotations

import functools
import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from oracle import assert_close, assert_same
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

import placer
from placer.program import lower

D = torch.float64
TWO = {"devices": ["cpu:0", "cpu:1"]}


class Cache:
    """A class that pytree does not know, as transformers' caches are."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []
        self.length = 0
        self.device: torch.device | None = None

    def update(self, keys: Tensor, values: Tensor) -> None:
        self.layers.append({"keys": keys, "values": values})
        self.length += keys.shape[1]
        self.device = keys.device


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, use_cache: bool = True) -> dict[str, Any]:
        cache = Cache()
        for layer in (self.a, self.b):
            keys = layer(x)
            cache.update(keys, x)
            x = torch.tanh(keys)
        return {"out": self.c(x), "cache": cache if use_cache else None}


def test_an_object_with_tensors_is_returned_whole() -> None:
    model = Caching().double()
    x = torch.randn(6, 3, 4, dtype=D)
    for fields in ({}, {"microbatches": 2}, {"replicas": 2}):
        placed = placer.compile(model, TWO | fields, x)
        cuts = max([1, *fields.values()])
        found, expected = placed(x), model(x)
        assert_close(found["out"], expected["out"], "out")
        assert isinstance(found["cache"], Cache)
        assert found["cache"].device == x.device
        assert found["cache"].length == expected["cache"].length, cuts
        for ours, theirs in zip(found["cache"].layers, expected["cache"].layers, strict=True):
            for name in ("keys", "values"):
                assert_close(ours[name], theirs[name], name)
        found["cache"].layers[1]["keys"].sum().backward()
        assert placed.a.weight.grad is not None
        longer = torch.randn(4, 5, 4, dtype=D)
        assert placed(longer)["cache"].length == 10
        placed.step(x, loss_fn=lambda output: output["out"].sum())
    assert_same(model, TWO, (x,), {"use_cache": False})


def keyword_only(forward: Any) -> Any:
    """A decorator that adds a keyword, as transformers has them."""

    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{"scale": 3.0} | kwargs)

    return wrapped


class Output:
    """A class of results that is registered with pytree without names for its parts, as diffusers' are."""

    def __init__(self, sample: Tensor, scale: Tensor) -> None:
        self.sample, self.scale = sample, scale


register_pytree_node(Output, lambda x: ([x.sample, x.scale], None), lambda parts, _: Output(*parts))


class ReturnsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, given: Output | None = None) -> Output:
        x = self.first(x) if given is None else self.first(x) * given.scale
        return Output(self.last(x), x.exp())


def test_a_class_that_pytree_knows_without_names() -> None:
    plain, x = ReturnsOutput().double(), torch.randn(4, 4, dtype=D)
    placed = placer.compile(plain, {**TWO, "microbatches": 2}, x)
    for ours, theirs in ((placed(x), plain(x)), (placed(x, plain(x)), plain(x, plain(x)))):
        assert isinstance(ours, Output)
        torch.testing.assert_close((ours.sample, ours.scale), (theirs.sample, theirs.scale))


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    @keyword_only
    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.a(x) * scale
        return self.b(x if shift is None else x + shift)


def test_keywords_stay_keywords_and_defaults_are_left_out() -> None:
    x, shift = torch.randn(4, 4, dtype=D), torch.randn(4, 4, dtype=D)
    assert_same(Decorated().double(), TWO, (x,))
    assert_same(Decorated().double(), TWO, (x,), {"shift": shift})
    assert_same(Decorated().double(), TWO, (x, shift), {"scale": 2.0})


class LooksAtValues(nn.Module):
    """Its own code looks at values, replaces no module and has no smaller part to keep whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 2), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.norm(x)
        x = self.a(x) if x.sum() > 0 else self.a(-x)
        return {"out": self.b(x), "rows": len(x)}


def test_a_model_that_cannot_be_recorded_is_one_piece() -> None:
    x = torch.randn(6, 4, dtype=D)
    spec = TWO | {"replicas": 2, "inputs": {"x": {"batch_dim": 0}}}
    placed = assert_same(LooksAtValues().double(), spec, (x,), scheduled=False)
    assert len(placed.plan.stages) == 1
    program = placer.api.lower(LooksAtValues(), (x.float(),))
    (whole,) = program.captured.whole_modules
    assert whole.layer == ""
    assert "test_calls.py:" in whole.location


class Asserting(nn.Module):
    """Fails where a value that it reads is one, and is sure of its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.to(x.dtype)
        if bool((x == 1e9).any()):
            raise AssertionError("too large")
        if random.random() < 2:
            x = -x
        return self.linear(x)


def test_values_are_guessed_until_forward_passes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Asserting(), nn.Linear(4, 2)).double()
    placed = assert_same(model, TWO, (torch.randn(4, 4, dtype=D),))
    assert len(placed.plan.stages) == 2
    placer.simulate(model, placed.plan, torch.randn(4, 4, dtype=D))


def test_what_is_no_module_or_has_no_inputs_says_what_to_write() -> None:
    def net() -> nn.Module:
        return nn.Linear(4, 2)

    with pytest.raises(placer.CaptureError, match=r"function 'net'(.|\n)*call it: net\(\)"):
        placer.compile(net, TWO, torch.randn(2, 4))  # type: ignore[arg-type]
    with pytest.raises(placer.CaptureError, match=r"give an example input: placer\.compile\("):
        placer.compile(net(), TWO)


def test_a_wrong_forward_names_the_line() -> None:
    with pytest.raises(placer.CaptureError) as error:
        placer.compile(LooksAtValues().double(), TWO, torch.randn(6, 5, dtype=D))
    assert "forward fails on these inputs (6x5)" in str(error.value)
    assert "test_calls.py:" in str(error.value)


@pytest.mark.parametrize("later", [False, True])
def test_the_traceback_of_a_wrong_forward_has_only_the_models_own_lines(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> list[str]:
        with pytest.raises(placer.CaptureError) as error:
            if later:
                placed(torch.randn(6, 4, dtype=D)[:, :3])
            else:
                placer.compile(LooksAtValues().double(), TWO, torch.randn(6, 3, dtype=D))
        assert error.value.__cause__ is not None
        frames = traceback.extract_tb(error.value.__cause__.__traceback__)
        return [Path(frame.filename).name for frame in frames]

    placed = placer.compile(LooksAtValues().double(), TWO, torch.randn(6, 4, dtype=D))
    assert set(files()) == {"test_calls.py"}
    monkeypatch.setenv("PLACER_TRACEBACK", "1")
    assert len(files()) > 10


class Selecting(nn.Module):
    """Results whose sizes the values decide: distinct ones, boxes that overlap little, repetitions."""

    def forward(self, boxes: Tensor, scores: Tensor) -> list[Tensor]:
        kept = torchvision.ops.nms(boxes, scores, 0.5)
        distinct, where = torch.unique(scores.round(), return_inverse=True)
        rows = torch.unique(boxes.detach().round(), dim=0)
        runs = torch.unique_consecutive(scores)
        names = {"box 0": 1.0, "box 1": 2.0}
        weight = names[f"box {(scores > 2).sum()}"]
        again = scores.repeat_interleave((scores > 0).long())
        return [boxes[kept] * weight, distinct, where, rows, runs, again]


@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated")  # by torchvision
def test_sizes_that_values_decide_are_guessed_and_stay_those_of_the_values() -> None:
    outer = Outer(Selecting()).double()
    boxes, scores = torch.rand(5, 4, dtype=D).cumsum(1), torch.rand(5, dtype=D)
    program = lower(outer, (boxes.to("meta"), scores.to("meta")))
    assert [whole.layer for whole in program.captured.whole_modules] == ["select"]
    placed = placer.compile(outer, TWO, (boxes, scores))
    for found, expected in zip(placed(boxes, scores), outer(boxes, scores), strict=True):
        assert_close(found, expected, "result")


class Outer(nn.Module):
    def __init__(self, select: nn.Module) -> None:
        super().__init__()
        self.before, self.select, self.after = nn.Linear(4, 4), select, nn.Linear(4, 2)

    def forward(self, boxes: Tensor, scores: Tensor) -> list[Tensor]:
        first, *others = self.select(boxes + self.before(boxes).abs(), scores)
        return [self.after(first), *others]


class NoDerivative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.unique(self.linear(x), dim=0)


def test_a_result_without_a_derivative_is_named_when_planning_for_training() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(placer.CaptureError, match="unique_dim") as caught:
        placer.make_plan(NoDerivative(), TWO, x)
    assert "detach" in caught.value.remedy
    placer.make_plan(NoDerivative().eval(), TWO | {"training": False}, x)


class Routed(nn.Module):
    """Which layers run is in a tensor that is neither parameter nor buffer."""

    def __init__(self, *, writes: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.active = torch.tensor([[1, 0], [1, 1]])
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes == "before":
            self.active[0].fill_(1)
        for layer, active in zip(self.layers, self.active.reshape(-1), strict=True):
            if active > 0:
                x = layer(x).tanh()
        if self.active[0].cpu().numpy().sum() > 1:
            x = x * 2
        if self.writes == "after":
            self.active += 1
        return x


def test_control_flow_over_constants_is_followed() -> None:
    x = torch.randn(3, 4, dtype=D)
    program = lower(Routed().double(), (x,))
    assert not program.captured.whole_modules
    assert {layer for layer in program.layers.values() if layer} == {
        "layers.0",
        "layers.2",
        "layers.3",
    }
    assert_same(Routed().double(), TWO, (x,))


@pytest.mark.parametrize("writes", ["before", "after"])
def test_control_flow_over_what_is_written_stays_whole(writes: str) -> None:
    x = torch.randn(3, 4, dtype=D)
    model = Routed(writes=writes).double()
    assert [whole.layer for whole in lower(model, (x,)).captured.whole_modules] == [""]
    assert model.active[0, 1] == 0
    placed = placer.compile(model, TWO, x)
    for _ in range(2):
        assert_close(placed(x), model(x), "output")


class PadsByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("padding", torch.tensor(2))
        self.conv = nn.Conv1d(1, 1, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(nn.functional.pad(x, (int(self.padding), int(self.padding))))


def test_sizes_out_of_buffers_are_what_the_error_names() -> None:
    with pytest.raises(placer.CaptureError, match="forward fails") as caught:
        placer.make_plan(PadsByBuffer(), TWO, torch.randn(2, 1, 8))
    assert "values of tensors, which planning does not have" in caught.value.remedy
