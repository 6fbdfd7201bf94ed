"""The law in space where it is easily broken: names that mean something else, writes, odd shapes, changes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import placer

D = torch.float64
TWO: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "space": 2}
GRID: dict[str, Any] = {
    "devices": [f"cpu:{i}" for i in range(4)],
    "space": {"shards": 4, "grid": [2, 2]},
}
FIVE: dict[str, Any] = {"devices": [f"cpu:{i}" for i in range(5)], "space": 5}
HEIGHT: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "space": {"shards": 2, "dims": ["height"]}}


class _Calls(nn.Module):
    """A convolution, and what ``function`` does with its result; other weights by name."""

    def __init__(self, function: Callable[..., Any], **own: Any) -> None:
        super().__init__()
        self._function = [function]
        self.conv = nn.Conv3d(2, 4, 3, padding=1)
        self.again = nn.Conv3d(4, 4, 3, padding=1)
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self._function[0](self, self.conv(x), *others)


def _numbers(result: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [x for x in leaves if isinstance(x, Tensor)]


def _assert_same(
    plain: nn.Module, placed: nn.Module, args: tuple[Tensor, ...], rtol: float = 1e-10
) -> None:
    """One call and backward: results, gradients of inputs and weights, buffers."""
    found = []
    for model in (plain, placed):
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        torch.manual_seed(1)
        results = _numbers(model(*given))
        torch.manual_seed(2)
        sums = [(x * torch.randn(x.shape, dtype=D)).sum() for x in results if x.requires_grad]
        sum(sums, torch.zeros(())).backward()
        weights = [x.grad for x in (*given, *model.parameters())]
        found.append([*results, *weights, *model.buffers()])
    for own, other in zip(*found, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            torch.testing.assert_close(other, own, rtol=rtol, atol=1e-10)


def _write_item(m: Any, y: Tensor) -> Tensor:
    y = y.clone()
    y[:, :, 2:4] = 0.5
    y[:, 0] *= 2
    result: Tensor = m.again(y)
    return result


def _add_to_buffer(m: Any, y: Tensor) -> Tensor:
    y = m.again(y + m.kept)
    m.kept.mul_(0.5)
    return y


def _read_write_read(m: Any, y: Tensor) -> tuple[Tensor, ...]:
    before = y.roll(1, 2)
    y.mul_(2)
    return before, y.flip(2), y


def _write_after_resize(m: Any, y: Tensor) -> tuple[Tensor, ...]:
    y = y * 1
    larger = F.interpolate(y, scale_factor=2, mode="trilinear")
    y += 1
    return larger, y


def _write_slice(m: Any, y: Tensor) -> tuple[Tensor, ...]:
    part = y[:, :, 1:-2]
    part.mul_(2)
    return part, m.again(y)


def _crop(m: Any, y: Tensor) -> Tensor:
    """As a U-Net of valid convolutions crops its skip."""
    inner = F.conv3d(y, m.again.weight)
    off = [(a - b) // 2 for a, b in zip(y.shape[2:], inner.shape[2:], strict=True)]
    skip = y[:, :, off[0] : off[0] + inner.shape[2], off[1] : -off[1], off[2] : -off[2]]
    return torch.cat([skip, inner], 1)


def _statistics(m: Any, y: Tensor) -> tuple[Tensor, ...]:
    y = F.relu(y)  # whose smallest elements are equal
    over = (2, 3, 4)
    return (
        *(
            y.amax(over),
            y.amin(over, keepdim=True),
            y.max(),
            y.amax(1),
            y.min(1)[0],
            y.amax((0, *over)),
        ),
        *(y.std(over, False), y.var(over, keepdim=True), torch.std(y, dim=over, correction=2)),
        *(y.var(), y.std(1), (y * 0).std(over)),
    )


def _buffer() -> nn.Buffer:
    return nn.Buffer(torch.randn(1, 4, 8, 6, 6))


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _write_copies(model: nn.Module, y: Tensor) -> tuple[Tensor, ...]:
    """Parts of these values, or gathered ones, are contiguous; the plain ones are not."""
    some, turned = y[:, :, 1:6], model.again(y).permute(0, 2, 3, 4, 1)
    return some.contiguous().add_(1), some, turned.reshape(-1, 4).add_(1), turned.flip(2)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]] = {
    "sum of an axis": (TWO, {}, lambda m, y: (y.sum(axis=1), y.sum(axis=2, keepdims=True))),
    "mean of axes": (TWO, {}, lambda m, y: torch.mean(y, axis=(2, 3, 4))),
    "sum of no dims": (TWO, {}, lambda m, y: y.sum([])),
    "sum into a tensor": (
        TWO,
        {},
        lambda m, y: (
            torch.sum(y.detach(), (2, 3, 4), out=torch.empty(2, 4, dtype=D)),
            y,
        ),
    ),
    "joined along an axis": (TWO, {}, lambda m, y: torch.cat([y, y + 1], axis=2)),
    "swapped axes": (TWO, {}, lambda m, y: torch.swapaxes(y, axis0=1, axis1=2) * 2),
    "largest channel": (TWO, {}, lambda m, y: y * y.argmax(1).unsqueeze(1)),
    "numbers of elements": (TWO, {}, lambda m, y: y / y.numel() * y.shape.numel()),
    "written items": (TWO, {}, _write_item),
    "written buffer": (TWO, {"kept": _buffer}, _add_to_buffer),
    "written copies": (TWO, {}, _write_copies),
    "written between reads": (TWO, {}, _read_write_read),
    "written after a resize": (TWO, {}, _write_after_resize),
    "weight per plane, grid": (GRID, {"p": lambda: _weight(1, 4, 8, 1, 1)}, lambda m, y: y + m.p),
    "weight per row, grid": (GRID, {"p": lambda: _weight(6, 6)}, lambda m, y: y + m.p),
    "weight as long as the height": (
        HEIGHT,
        {"w": lambda: _weight(6, 6)},
        lambda m, y: F.linear(y, m.w),
    ),
    "PReLU of planes": (
        TWO,
        {"act": lambda: nn.PReLU(8)},
        lambda m, y: m.act(y.transpose(1, 2)),
    ),
    "written slice": (TWO, {}, _write_slice),
    "rows of half the batch": (TWO, {}, lambda m, y: (y[: y.shape[0] // 2], y[:, :, : y.shape[0]])),
    "position of a cut dimension": (TWO, {}, lambda m, y: (y[:, :, 3], y.select(2, -1), y[..., 0])),
    "elements by a mask": (TWO, {}, lambda m, y: y[y.detach() > 0]),
    "a plane, and others": (TWO, {}, lambda m, y: (y[:, :1, 1:-1], y[:, None, :, ::2])),
    "squeezed": (TWO, {}, lambda m, y: (y[:, :, :1].squeeze(2), y[:, :1].squeeze())),
    "largest positions": (
        TWO,
        {},
        lambda m, y: (
            torch.where(y.argmax(1, True) == 1, y, 0),
            F.adaptive_max_pool3d(y, 1),
            *F.adaptive_max_pool3d(y, 2, return_indices=True),
            *y.max(2),
            torch.max(y, y.flip(2)),
        ),
    ),
    "circular padding of more than a part": (
        TWO,
        {"c": lambda: nn.Conv3d(4, 2, 3, padding=(6, 1, 1), padding_mode="circular")},
        lambda m, y: (F.pad(y, (1, 1, 0, 0, 7, 6), "circular"), m.c(y)),
    ),
    "running statistics": (
        TWO,
        {"mean": lambda: nn.Buffer(torch.zeros(4)), "var": lambda: nn.Buffer(torch.ones(4))},
        lambda m, y: F.batch_norm(y, m.mean, m.var, training=True),
    ),
    "adaptive pooling": (
        TWO,
        {"pool": lambda: nn.AdaptiveAvgPool3d((2, 3, 3))},
        lambda m, y: m.pool(y),
    ),
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("spec", "own", "function"), CALLS.values(), ids=CALLS)
def test_calls(
    spec: dict[str, Any], own: dict[str, Callable[[], Any]], function: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    plain = _Calls(function, **{name: make() for name, make in own.items()}).double()
    x = torch.randn(2, 2, 8, 6, 6, dtype=D)
    placed = placer.compile(plain, spec, x)
    for rows in (2, 3):
        if rows == 3 and function is CALLS["sum into a tensor"][2]:
            continue  # its tensor has two rows
        _assert_same(plain, placed, (torch.randn(rows, 2, 8, 6, 6, dtype=D),))


def _padding(mode: str) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Convolutions that pad so: of a value, of a concatenation, with a stride, on two sides of a length."""
    own = {
        "one": lambda: nn.Conv3d(4, 4, 3, padding=1, padding_mode=mode),
        "two": lambda: nn.Conv3d(8, 3, (2, 3, 5), stride=2, padding=(1, 1, 2), padding_mode=mode),
        "same": lambda: nn.Conv3d(4, 2, 3, padding="same", dilation=(1, 2, 1), padding_mode=mode),
    }
    return own, lambda m, y: (m.one(y), m.two(torch.cat([y, F.relu(y)], 1)), m.same(y))


CUT: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    **{f"{mode} convolutions": _padding(mode) for mode in ("circular", "reflect", "replicate")},
    "padded on one side": (
        {
            "one": lambda: nn.Conv3d(4, 2, 2, padding="same"),
            "two": lambda: nn.Conv3d(8, 2, (4, 2, 3), padding="same", dilation=(1, 3, 1)),
            "mirror": lambda: nn.Conv3d(4, 2, (2, 1, 2), padding="same", padding_mode="reflect"),
        },
        lambda m, y: (
            *(m.one(y), m.two(torch.cat([y, F.relu(y)], 1)), m.mirror(y)),
            F.conv3d(y, m.one.weight, padding="same"),
        ),
    ),
    "circular pads": (
        {"pad": lambda: nn.CircularPad3d((0, 1, 2, 2, 1, 1))},
        lambda m, y: (m.pad(y), F.pad(y, (1, 1, 0, 0, 2, 1), "circular")),
    ),
    "crop of a skip": ({}, _crop),
    "statistics": ({}, _statistics),
    "pads": (
        {"same": lambda: nn.ReplicationPad3d((1, 0, 0, 2, 3, 1)), "zero": lambda: nn.ZeroPad3d(2)},
        lambda m, y: (
            *(
                m.same(y),
                m.zero(y),
                F.pad(y, (1, 2, 0, 0, 0, 0), "circular"),
                F.pad(y, (0,) * 6 + (1, 2)),
            ),
            *(F.pad(y, (1, 2) * 3, "reflect"), F.pad(y, (0, 0, 0, 0, -7, 6), value=2.0)),
        ),
    ),
    "written pads": (
        {"up": lambda: nn.ConvTranspose3d(4, 1, 3, stride=2), "pad": lambda: nn.ReflectionPad3d(1)},
        lambda m, y: [F.relu_(x) for x in (m.pad(y), m.up(y), F.pad(y, (1, 2)))],
    ),
    "slices": (
        {},
        lambda m, y: (
            *(y[:, :, 1:], y[..., ::2, :, -3:], y[:, 0, :], y[:, 1:3], y[:, None]),
            *(y.narrow(2, -3, 2), y.narrow(1, 1, 2), y.select(1, 0), y[:, :, 2 : y.shape[2] // 2]),
        ),
    ),
    "views": ({}, lambda m, y: torch.stack([y, y + 1], 2).squeeze(0).unsqueeze(-1)),
    "functional norms": (
        {"w": lambda: _weight(4), "mean": lambda: nn.Buffer(torch.rand(4))},
        lambda m, y: (
            *(F.instance_norm(y, weight=m.w), F.group_norm(y, 2, m.w, m.w, 0.1)),
            *(F.batch_norm(y, None, None, m.w, training=True), F.batch_norm(y, m.mean, m.mean + 1)),
        ),
    ),
    "norms and gates over channels": (
        {"norm": lambda: nn.RMSNorm(4), "w": lambda: _weight(4)},
        lambda m, y: (
            *(m.norm(y.permute(0, 2, 3, 4, 1)), F.glu(y, 1)),
            F.rms_norm(y.transpose(1, -1), (4,), m.w).transpose(1, -1),
        ),
    ),
    "largest of blocks": (
        {"pool": lambda: nn.AdaptiveMaxPool3d((8, 2, 3))},
        lambda m, y: m.pool(y[..., :6]),
    ),
    "nearest by a size": (
        {"up": lambda: nn.Upsample((16, 12, 6))},
        lambda m, y: (F.interpolate(y, (16, 6, 12)), m.up(y)),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "spec", [TWO, GRID, {**FIVE, "chunks": 3}], ids=["2", "2x2", "5 in chunks"]
)
@pytest.mark.parametrize(("own", "function"), CUT.values(), ids=CUT)
def test_calls_of_which_nothing_is_gathered(
    own: dict[str, Callable[[], Any]], function: Callable[..., Any], spec: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = _Calls(function, **{name: make() for name, make in own.items()}).double()
    placed = placer.compile(plain, spec, torch.randn(2, 2, 8, 6, 6, dtype=D))
    assert not any("Gathered" in note for note in placed.plan.notes)
    for rows in (2, 3):
        _assert_same(plain, placed, (torch.randn(rows, 2, 8, 6, 6, dtype=D),))


def test_a_note_says_what_is_gathered_and_what_that_costs() -> None:
    """A value of 2 x 4 x 8 x 6 x 6 doubles; each of two shards sends a half, and half of the gradient."""
    plain = _Calls(lambda m, y: y.roll(1, 2) + m.again(y).roll(1, 2)).double()
    plan = placer.make_plan(plain, TWO, torch.randn(2, 2, 8, 6, 6, dtype=D))
    (note,) = (note for note in plan.notes if "Gathered" in note)
    assert "roll, roll_1 (placer has no rule for it). That gathers 36.00 KiB" in note
    assert "a shard sends 36.00 KiB" in note


def test_a_convolution_after_tokens_runs_on_parts() -> None:
    """As the decoder of a transformer for volumes: what it reads was gathered before."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Conv3d(1, 4, 2, 2), nn.Linear(4, 4)
            self.up, self.head = nn.ConvTranspose3d(4, 2, 2, 2), nn.Conv3d(3, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            y = y + self.mix(y.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(y.shape)
            result: Tensor = self.head(torch.cat([x, self.up(y * 1)], 1))
            return result

    plain, x = Tokens().double(), torch.randn(2, 1, 10, 8, 6, dtype=D)
    placed = placer.compile(plain, {"devices": [f"cpu:{i}" for i in range(3)], "space": 3}, x)
    assert any("for 3 operations" in note for note in placed.plan.notes)
    _assert_same(plain, placed, (x,))


@pytest.mark.parametrize(
    ("norm", "shape"),
    [(nn.InstanceNorm3d(3), (3, 6, 8, 4)), (nn.InstanceNorm2d(3, affine=True), (3, 6, 8))],
    ids=str,
)
def test_instance_norm_without_rows(norm: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=D)
    plain = nn.Sequential(norm).double()
    spec = {"devices": ["cpu:0", "cpu:1"], "space": {"shards": 2, "dims": [2]}}
    _assert_same(plain, placer.compile(plain, spec, x), (x,))


def test_an_input_of_one_plane_is_broadcast_and_nothing_gathered() -> None:
    plain = _Calls(lambda m, y, scale: m.again(y * scale)).double()
    args = (torch.randn(2, 2, 8, 6, 6, dtype=D), torch.randn(2, 4, 1, 1, 1, dtype=D))
    placed = placer.compile(plain, TWO, args)
    assert not any("Gathered" in note for note in placed.plan.notes)
    _assert_same(plain, placed, args)


def _change(name: str, value: Any) -> Callable[[nn.Module], object]:
    return lambda layer: setattr(layer, name, value)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("layer", "change"),
    [
        (lambda: nn.MaxPool3d(2), _change("kernel_size", 3)),
        (lambda: nn.Conv3d(4, 4, 3), _change("stride", (2, 2, 2))),
        (lambda: nn.GroupNorm(2, 4), _change("num_groups", 4)),
        (lambda: nn.Dropout(0.0), _change("p", 0.5)),
        (nn.ReLU, lambda m: m.register_forward_hook(lambda *call: call[2].flip(2))),
    ],
    ids=["pool", "convolution", "norm", "dropout", "hook"],
)
def test_a_layer_that_is_changed_later(
    layer: Callable[[], nn.Module], change: Callable[[nn.Module], object]
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), layer()).double()
    x = torch.randn(2, 2, 8, 6, 6, dtype=D)
    placed = placer.compile(plain, TWO, x)
    for model in (plain, placed):
        change(model[1])
    _assert_same(plain, placed, (x,))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm3d(4)], ids=str)
def test_autocast_has_the_types_of_the_plain_model(norm: nn.Module) -> None:
    plain = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), norm)
    x = torch.randn(2, 2, 8, 6, 6)
    for tail in (nn.Identity(), nn.AdaptiveAvgPool3d(1)):
        model = nn.Sequential(*plain, tail)
        placed = placer.compile(model, {**TWO, "precision": "bf16"}, x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x)
        torch.testing.assert_close(placed(x), expected, rtol=0.03, atol=0.03)


def test_autocast_leaves_float64_alone() -> None:
    plain = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.PReLU()).double()
    x = torch.randn(2, 2, 8, 6, 6, dtype=D)
    found = placer.verify(plain, {**TWO, "precision": "bf16"}, x)
    assert found.ok and found.worst.tolerance == 1e-10


def test_a_mean_of_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 2, 32, 32, 48), 2.0, dtype=torch.float16)
    plain = nn.Sequential(nn.Identity(), nn.AdaptiveAvgPool3d(1))
    assert torch.equal(placer.compile(plain, TWO, x)(x), plain(x))


def test_two_threads_with_other_numbers_of_shards() -> None:
    x = torch.randn(2, 2, 8, 6, 6, dtype=D)
    plain = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3)).double()
    four = {"devices": [f"cpu:{i}" for i in range(4)], "space": 4}
    placed = [placer.compile(copy.deepcopy(plain), spec, x) for spec in (TWO, four)]
    wrong: list[Any] = []

    def run(model: nn.Module) -> None:
        try:
            for _ in range(10):
                torch.testing.assert_close(model(x), plain(x))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in placed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_transforms_are_refused() -> None:
    x = torch.randn(2, 2, 8, 6, 6)
    placed = placer.compile(nn.Sequential(nn.Conv3d(2, 4, 3)), TWO, x)
    with pytest.raises(placer.PlacerError, match=r"torch\.func"):
        torch.func.vmap(placed)(x[None])


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({"shards": 2, "dims": [2, -3]}, "twice"),
        ({"shards": 2, "dims": [0]}, "has the rows of the batch"),
        ({"shards": 2, "layers": ["nothere"]}, "no layer matches 'nothere'"),
        ({"shards": 2, "layer": ["0"]}, "did you mean 'layers'"),
        ({"shards": 2, "dims": ["hight"]}, "1 problem"),
    ],
    ids=str,
)
def test_a_spec_that_would_cut_nothing_or_something_else_is_refused(space: Any, said: str) -> None:
    x = torch.randn(2, 2, 8, 6, 6)
    with pytest.raises(placer.SpecError, match=said):
        placer.compile(nn.Sequential(nn.Conv3d(2, 4, 3)), {**TWO, "space": space}, x)


def test_a_model_of_which_nothing_is_cut_says_so() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    notes = placer.make_plan(model, TWO, torch.randn(4, 1, 4, 4)).notes
    assert any("Nothing is split in space" in note for note in notes)


def test_a_gradient_penalty_is_refused() -> None:
    """Also of a network that is linear around ``x``, where no gradient that comes in has a graph."""
    model = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.LeakyReLU(), nn.Conv1d(3, 1, 3))
    x = torch.randn(2, 1, 8, requires_grad=True)
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"], "space": 2}, x)
    output = placed(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(placer.PlacerError, match="once only"):
        (output.mean() + gradient.square().mean()).backward()


def test_a_dry_run_finds_the_gradient_of_a_cast_on_the_device_of_its_shard() -> None:
    plain = _Calls(lambda m, y: m.again(y.to(torch.float64).float()))
    x = torch.randn(2, 2, 8, 6, 6)
    plan = placer.make_plan(plain, TWO, x)
    assert placer.simulate(plain, plan, args=(x,)).step_ok  # no operation mixes devices


class _Numbers(nn.Module):
    """Calls that take a number of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1)

    def forward(self, x: Tensor, size: int, share: float) -> tuple[Tensor, ...]:
        y = self.conv(x)
        return (
            *(F.group_norm(y, 2, eps=share), F.huber_loss(y, y.flip(1), delta=share)),
            *(F.dropout(y, share - 0.125), y.std((2, 3, 4), correction=share), y.clamp(min=share)),
            *(F.avg_pool3d(y, size), F.interpolate(y, scale_factor=size), y[:, :, size:]),
            *(F.adaptive_avg_pool3d(y, size), F.pad(y, (0, 0, 0, 0, size, 0))),
        )


@pytest.mark.matrix(1)
@pytest.mark.parametrize("spec", [TWO, {**TWO, "chunks": 2}], ids=["2", "2 in chunks"])
def test_numbers_that_differ_between_calls(spec: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = _Numbers().double()
    x = torch.randn(2, 2, 8, 6, 6, dtype=D)
    placed = placer.compile(plain, spec, (x, 2, 0.125))
    for size, share in ((2, 0.5), (3, 0.25), (1, 0.75)):
        found = []
        for model in (plain, placed):
            torch.manual_seed(1)
            found.append(model(x, size, share))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", [nn.BatchNorm3d(4), nn.GroupNorm(2, 4)], ids=["batch", "group"])
def test_norms_whose_weights_have_half_precision(norm: nn.Module) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv3d(2, 4, 3), norm).bfloat16()
    x = torch.randn(2, 2, 8, 6, 6, dtype=torch.bfloat16)
    placed = placer.compile(plain, TWO, x)
    assert not any("Gathered" in note for note in placed.plan.notes)
    results = []
    for model in (placed, plain):
        result = model(x)
        result.square().mean().backward()
        results.append([result, *(p.grad for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)
