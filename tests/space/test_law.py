"""The law for stages that are split in space: everything that the plain model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import captured_once
from oracle import assert_same
from space_networks import ValidUNet, random_case
from thin import thin_resnet18, thin_video_model
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.video import r3d_18
from unet3d import unet3d

import placer

D = torch.float64


def _devices(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def _worst(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        assert found is expected
        return 0.0
    return (found - expected).abs().max().item() / max(expected.abs().max().item(), 1.0)


def _check_network(seed: int) -> bool:
    """Output, gradients and buffers of a random network; False if torch does not run it."""
    case = random_case(seed)
    if case is None:
        return False
    plain, x, fields = case
    shards = fields["space"] if isinstance(fields["space"], int) else 4
    placed = placer.compile(plain, {"devices": _devices(shards), **fields}, x)
    own = copy.deepcopy(plain)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    torch.manual_seed(seed)
    expected = own(inputs[0])
    torch.manual_seed(seed)
    found = placed(inputs[1])
    assert _worst(found, expected) < 1e-10
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    pairs = [(inputs[1].grad, inputs[0].grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(placed.parameters(), own.parameters(), strict=True)]
    pairs += [
        (a.double(), b.double()) for a, b in zip(placed.buffers(), own.buffers(), strict=True)
    ]
    for pair in pairs:
        assert _worst(*pair) < 1e-9, seed  # norms over few values amplify rounding
    return True


@pytest.mark.matrix(2)
@pytest.mark.parametrize("start", [*range(0, 400, 10), 500])
def test_random_networks(start: int) -> None:
    assert sum(map(_check_network, range(start, start + 10))) > 0


class _Mixed(nn.Module):
    """Weights and inputs that are not cut, a skip, views, sizes, and what has no rule (a roll)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 4, 3, padding=1)
        self.position = nn.Parameter(torch.randn(1, 4, 8, 6, 4))
        self.scale = nn.Parameter(torch.randn(4, 1, 1, 1))
        self.time = nn.Linear(3, 4)
        self.down = nn.Conv3d(4, 6, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(6)
        self.up = nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.head = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        skip = F.relu(self.stem(x)) * self.scale + self.position
        y = self.down(skip + self.time(t)[:, :, None, None, None])
        y = self.norm(y.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)
        y = self.up(y.roll(1, 2))
        y = F.interpolate(y, skip.shape[2:], mode="trilinear", align_corners=True)
        y = torch.cat([skip, y], dim=1)
        return {"map": self.head(y), "mean": skip.mean((2, 3, 4))}


def _mixed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _Mixed(), (torch.randn(4, 1, 8, 6, 4, dtype=D), torch.randn(4, 3, dtype=D))


class _Fourier(nn.Module):
    """A Fourier neural operator of two layers, whose transforms are gathered."""

    def __init__(self, width: int = 3, modes: int = 3) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.weights = nn.ParameterList(torch.randn(width, width, modes, modes, 2) for _ in "12")
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in "12")
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        x, m = self.lift(x), self.modes
        for weight, layer in zip(self.weights, self.local, strict=True):
            found = torch.fft.rfft2(x)
            low = torch.einsum(
                "bixy,ioxy->boxy", found[:, :, :m, :m], torch.view_as_complex(weight)
            )
            spectrum = F.pad(low, (0, found.size(3) - m, 0, found.size(2) - m))
            x = F.gelu(torch.fft.irfft2(spectrum, s=x.shape[2:]) + layer(x))
        result: Tensor = self.project(x)
        return result


def _volume(rows: int, *shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 1, *shape, dtype=D),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "U-Net, batch norm": lambda: (unet3d(width=2, depth=2, norm="batch"), _volume(4, 20, 8, 8)),
    "U-Net, instance norm": lambda: (
        unet3d(width=2, depth=2, norm="instance"),
        _volume(4, 20, 8, 8),
    ),
    "U-Net, empty parts": lambda: (unet3d(width=2, depth=4, norm="group"), _volume(4, 16, 8, 8)),
    "mixed": _mixed,
    "2D U-Net": lambda: (ValidUNet(), (torch.randn(4, 1, 21, 18, dtype=D),)),
    "FNO": lambda: (_Fourier(), (torch.randn(4, 1, 12, 9, dtype=D),)),
}
BATCH_NORMS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "resnet18": lambda: (thin_resnet18(classes=3), (torch.randn(4, 3, 64, 48, dtype=D),)),
    "r3d_18": lambda: (
        thin_video_model(r3d_18, classes=3),
        (torch.randn(4, 3, 9, 16, 16, dtype=D),),
    ),
}
FIELDS: dict[str, dict[str, Any]] = {
    "2": {"space": 2},
    "3 in chunks": {"space": 3, "chunks": 2},
    "2x2": {"space": {"shards": 4, "grid": [2, 2]}},
    "8": {"space": 8},
    "width": {"space": {"shards": 2, "dims": ["width"]}},
    "2 stages, recomputed": {"space": 2, "stages": 2, "checkpoint": ["**"]},
    "2 replicas": {"space": 2, "replicas": 2},
    "2 stages, offloaded": {"space": 2, "stages": 2, "microbatches": 2, "offload": ["**"]},
    "2 stages, 2 replicas": {
        "space": 2,
        "stages": 2,
        "replicas": 2,
        "microbatches": 2,
        "schedule": "1F1B",
    },
    "split backward": {
        "space": 2,
        "stages": 2,
        "microbatches": 2,
        "schedule": "InterleavedZeroBubble",
    },
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models(
    model: Callable[[], tuple[nn.Module, tuple[Any, ...]]], fields: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain, args = model()
    given = dict(fields)
    space = given["space"]
    shards = space if isinstance(space, int) else space["shards"]
    stages = given.pop("stages", 1)
    if "2x2" in str(fields) or shards == 8:
        args = tuple(x[:2] for x in args)
    if shards > min(x for x in args[0].shape[2:3]):
        pytest.skip("fewer planes than shards")
    spec = {"devices": _devices(stages * shards), "objective": "bottleneck", **given}
    placed = assert_same(plain.double(), spec, args)
    assert len(placed.plan.stages) == stages
    assert placed.plan.shards == shards


@pytest.mark.matrix(1)
@pytest.mark.parametrize("space", [2, 3, 8, {"shards": 2, "dims": ["width"]}], ids=str)
@pytest.mark.parametrize("model", BATCH_NORMS.values(), ids=BATCH_NORMS)
def test_models_with_batch_norm(
    model: Callable[[], tuple[nn.Module, tuple[Any, ...]]], space: Any
) -> None:
    """Not in slices: norms over few values amplify rounding."""
    torch.manual_seed(0)
    plain, args = model()
    shards = space if isinstance(space, int) else space["shards"]
    assert_same(plain.double(), {"devices": _devices(shards), "space": space}, args)


@captured_once()
def test_one_process_offloads_the_parts_of_every_shard() -> None:
    """As the process of a shard does, which is tested under torchrun."""
    plain, args = unet3d(width=2, depth=2, norm="group").double(), _volume(2, 10, 8, 8)
    peaks = {}
    for processes in (False, True):
        spec = {"devices": _devices(2), "space": 2, "offload": ["**"]}
        plan = placer.make_plan(plain, spec, args, processes=processes)
        peaks[processes] = [device.peak for device in plan.devices]
    kept = placer.make_plan(plain, {"devices": _devices(2), "space": 2}, args)
    assert peaks[False] == pytest.approx(peaks[True], rel=0.01)
    assert max(peaks[False]) < 0.6 * max(device.peak for device in kept.devices)


def test_dropout_has_the_masks_of_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.Dropout(0.4), nn.Dropout3d(0.3), nn.Conv3d(4, 2, 3)
    ).double()
    (x,) = _volume(2, 9, 6, 6)
    placed = placer.compile(plain, {"devices": _devices(3), "space": 3}, x)
    torch.manual_seed(1)
    expected = plain(x)
    torch.manual_seed(1)
    assert torch.allclose(placed(x), expected, rtol=1e-10, atol=1e-12)


def test_a_hook_that_is_added_later_runs_on_the_whole() -> None:
    plain = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU())
    x = torch.randn(1, 1, 8, 4, 4)
    placed = placer.compile(plain, {"devices": _devices(2), "space": 2}, x)
    for model in (placed, plain):
        model[0].register_forward_hook(lambda module, args, result: result.flip(2))
    assert torch.allclose(placed(x), plain(x), rtol=1e-5, atol=1e-6)


def test_a_hook_that_is_there_before_runs_on_the_whole() -> None:
    plain = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 2, 3, padding=1)).double()
    seen = []
    plain[1].register_forward_hook(lambda module, args, result: seen.append(result.shape))
    x = torch.randn(1, 1, 8, 4, 4, dtype=D)
    placed = placer.compile(plain, {"devices": _devices(2), "space": 2}, x)
    seen.clear()
    assert torch.allclose(placed(x), plain(x), rtol=1e-12)
    assert set(seen) == {torch.Size([1, 2, 8, 4, 4])}
    assert any("Gathered" in note for note in placed.plan.notes)


def test_other_sizes_are_cut_anew() -> None:
    """A window is of one size of input; another size is another program."""
    plain = unet3d(width=2, depth=2, norm="group").double()
    placed = placer.compile(plain, {"devices": _devices(3), "space": 3}, *_volume(1, 8, 4, 4))
    for shape in ((12, 8, 4), (6, 6, 6), (8, 4, 4)):
        (x,) = _volume(3, *shape)
        assert torch.allclose(placed(x), plain(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"space": 3}, "2 devices for stages of 3 devices each"),
        ({"space": {"shards": 2, "grid": [3]}}, "must multiply to the number of shards"),
        ({"space": {"shards": 2, "dims": ["dept"]}}, "did you mean"),
        ({"space": 0}, "space"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(placer.SpecError, match=said):
        placer.PlacementSpec(devices=["cpu:0", "cpu:1"], **fields)


@pytest.mark.parametrize(
    ("model", "args", "said"),
    [
        (nn.Linear(3, 2), (torch.randn(4, 3),), "no input has dimensions to cut"),
        (nn.Conv3d(1, 1, 1), (torch.randn(1, 1, 1, 1, 1),), "too few for a grid"),
    ],
)
def test_an_input_that_cannot_be_cut_is_refused(
    model: nn.Module, args: tuple[Tensor, ...], said: str
) -> None:
    with pytest.raises(placer.SpecError, match=said):
        placer.compile(model, {"devices": _devices(2), "space": 2}, args)


class _WithLoss(nn.Module):
    """Losses in forward: of torch.nn.functional, and one made of sums over the volume."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = unet3d(width=2, depth=2, norm="group")
        self.kind = kind
        self.loss = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.net(x)
        if self.kind == "classes":
            return self.loss(y, target)
        if self.kind == "several":
            return F.mse_loss(y, target, reduction="sum") + F.smooth_l1_loss(y, target, beta=0.5)
        p = y.softmax(1)
        overlap = (p * target).sum((2, 3, 4))
        return 1 - (2 * overlap / (p.sum((2, 3, 4)) + target.sum((2, 3, 4)))).mean()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", ["classes", "several", "dice"])
def test_a_loss_in_forward_is_computed_in_parts(kind: str) -> None:
    torch.manual_seed(0)
    plain = _WithLoss(kind).double()
    (x,) = _volume(2, 10, 8, 8)
    target: Tensor = torch.rand_like(plain.net(x)).detach()
    if kind == "classes":
        target = torch.randint(0, target.size(1), (2, 10, 8, 8))
    placed = placer.compile(plain, {"devices": _devices(3), "space": 3}, (x, target))
    assert not any("Gathered" in note for note in placed.plan.notes)
    expected = plain(x, target)
    expected.backward()
    assert torch.allclose(placed.step(x, target, loss_fn=lambda loss: loss), expected, rtol=1e-12)
    for found, own in zip(placed.parameters(), plain.parameters(), strict=True):
        assert _worst(found.grad, own.grad) < 1e-10
