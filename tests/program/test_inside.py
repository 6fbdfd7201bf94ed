"""What a single node does inside is followed too: it is refused with several slices where it mixes rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from tests.program.test_rows import MIXING

Function = Callable[[Tensor], Tensor]
SPEC = {"devices": ["cuda:0", "cuda:1"], "layers": {"first": "cuda:0", "last": "cuda:1"}}
SLICES = {"replicas": 2, "microbatches": 2}


class Checked(nn.Module):
    """Stays whole, because it reads a value."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any()
        return self.function(x)


class Hooked(nn.Identity):
    """Stays whole, because a hook replaces its result."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: function(output))


class Applied(nn.Module):
    """Applies a function with a backward of its own, which is one node."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return _Applied.apply(x, self.function)


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Function) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.function(x), x, grad)[0], None


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)

    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x - x.mean(0)


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def _written(x: Tensor) -> Tensor:
    """The view that is written is not what is read later."""
    out = torch.zeros_like(x)
    out[:, :3] = x[:, :3]
    return x - out.mean(0)


def _with_gradient(x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return x + torch.autograd.grad(loss(y.tanh()), y)[0]


def _rows_of_a_mask(x: Tensor) -> Tensor:
    (rows,) = torch.where(x[:, 0] > 0)
    return torch.zeros_like(x).index_add_(0, rows, 2 * x[rows])


def _where_masked(x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), x > 0
    out[mask] = x[mask].exp()
    return out


MIXES: dict[str, Function] = {
    "mean": lambda x: x - x.mean(0),
    "selected": lambda x: x - x[x > 0].mean(),
    "written": _written,
    "first row": lambda x: x - x[0],
    "sorted": lambda x: x.sort(0).values,
    "rolled": lambda x: x.roll(1, 0),
    "distances": lambda x: torch.cdist(x, x).mean(1, keepdim=True) * x,
    "length": lambda x: x * len(x),
    "array of the length": lambda x: x * torch.from_numpy(np.array(float(len(x)))),
    "mean of gradients": lambda x: _with_gradient(x, torch.mean),
    "row by row": lambda x: torch.stack([row - x.mean(0) for row in x]),
    "numbers of rows": lambda x: x + (x[:, 0] < 9).nonzero(),
    "other order": lambda x: x * x.T[x.T > -9].view(6, -1).T,
    "scripted": lambda x: scripted(x),
}
SEPARATES: dict[str, Function] = {
    "check": lambda x: x.tanh(),
    "selected": _where_masked,
    "rows of a mask": _rows_of_a_mask,
    "norm": lambda x: nn.functional.layer_norm(x, (6,)),
    "softmax": lambda x: x.softmax(1),
    "sorted": lambda x: x.gather(1, x.argsort(1)),
    "own columns": lambda x: x * x[torch.arange(len(x)), x.argmax(1)][:, None],
    "array of rows": lambda x: x * torch.from_numpy(np.full((len(x), 6), 0.5)),
    "sum of gradients": lambda x: _with_gradient(x, torch.sum),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(
        *3 * [x.view(-1, 2, 3)]
    ).flatten(1),
}


def _net(kind: type[nn.Module], function: Function) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(kind(function)).double(), torch.randn(8, 6, dtype=torch.float64)


def _assert_refused(kind: type[nn.Module], function: Function, reason: str = "it ") -> None:
    net, x = _net(kind, function)
    with pytest.raises(placer.CaptureError, match=rf"inner: {reason}"):
        placer.compile(net, {**SPEC, **SLICES}, x, run_on="cpu")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", MIXES)
def test_a_whole_module_that_mixes_rows_is_refused(name: str) -> None:
    _assert_refused(Checked, MIXES[name])


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "name", ["statistic", "softmax", "sum of rows", "numbers of rows", "count in a division"]
)
def test_it_is_refused_for_the_reason_for_which_recorded_code_is(name: str) -> None:
    _assert_refused(Checked, *MIXING[name])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", [Hooked, Applied])
@pytest.mark.parametrize("name", ["mean", "written", "distances"])
def test_hooks_and_autograd_functions_are_refused_too(kind: type[nn.Module], name: str) -> None:
    _assert_refused(kind, MIXES[name])


def test_one_slice_is_computed_and_so_are_several_that_the_spec_asks_for() -> None:
    net, x = _net(Checked, MIXES["mean"])
    said = {**SPEC, **SLICES, "inputs": {"x": {"batch_dim": 0}}}
    assert placer.compile(net, said, x, run_on="cpu").plan.notes
    placed = placer.compile(net, SPEC, x, run_on="cpu")
    torch.testing.assert_close(placed(x), net(x))


class Flags(nn.Module):
    """Sets a flag, from values of the batch or not."""

    def __init__(self, *, of_values: bool) -> None:
        super().__init__()
        self.of_values, self.saturated = of_values, False

    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any()
        self.saturated = bool((x > 2).any()) if self.of_values else True
        return x * 2


def test_a_flag_that_is_set_from_values_of_the_batch_is_refused() -> None:
    x = torch.randn(8, 6)
    net = Net(Flags(of_values=True))
    with pytest.raises(placer.CaptureError, match="inner: it decides by values"):
        placer.compile(net, {**SPEC, **SLICES}, x, run_on="cpu")
    placed = placer.compile(Net(Flags(of_values=False)), {**SPEC, **SLICES}, x, run_on="cpu")
    placed(x)
    assert placed.inner.saturated


def test_a_whole_model_that_mixes_rows_is_refused() -> None:
    x = torch.randn(8, 6)
    spec = {"devices": ["cuda:0", "cuda:1"], "replicas": 2}
    with pytest.raises(placer.CaptureError, match="Checked: it uses a statistic of the batch"):
        placer.compile(Checked(MIXES["mean"]), spec, x, run_on="cpu")


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((Checked, name) for name in SEPARATES if name != "selected"),
        pytest.param(
            Checked,
            "selected",
            marks=pytest.mark.xfail(
                raises=placer.CaptureError, strict=True, reason="refused, though rows are separate"
            ),
        ),
        *((Hooked, "check"), (Applied, "softmax")),
    ],
)
def test_separate_rows_go_on_to_be_split(kind: type[nn.Module], name: str) -> None:
    net, x = _net(kind, SEPARATES[name])
    placed = placer.compile(copy.deepcopy(net), {**SPEC, **SLICES}, x, run_on="cpu")
    for given in (x, -x, x[:7]):
        torch.testing.assert_close(placed(given), net(given))
