"""Functions with a backward of their own: custom autograd functions, and functions of TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_inputs import UNCUT, WAYS, Arguments, assert_equal_calls
from torch import Tensor, nn

from placer import CaptureError
from placer.program import lower

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")


def script(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(function)


def call(rows: int = 4) -> Callable[[], Arguments]:
    return lambda: (torch.randn(rows, 8, dtype=torch.float64),)


CALLS = [call(), call(), call(6), call(8)]


class Adjoint(torch.autograd.Function):
    """Euler's method; its backward integrates back, and calls the module again for its derivatives."""

    @staticmethod
    def forward(ctx: Any, function: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function = function
        with torch.no_grad():
            for step in range(3):
                y = y + 0.1 * function(step * 0.1, y)
        ctx.save_for_backward(y, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        y, *parameters = ctx.saved_tensors
        found = [torch.zeros_like(p) for p in parameters]
        for step in reversed(range(3)):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.function(step * 0.1, y)
                inner, *others = torch.autograd.grad(slope, (y, *parameters), gradient)
            gradient = gradient + 0.1 * inner
            found = [a + 0.1 * b for a, b in zip(found, others, strict=True)]
            y = y - 0.1 * slope
        return None, gradient, *found


adjoint = Adjoint.apply


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, t: float, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(y) + t))


class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = Slope()

    def forward(self, y: Tensor) -> Tensor:
        return Adjoint.apply(self.slope, y, *self.slope.parameters())


class AtTheTop(nn.Module):
    """A model that integrates in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slope, self.last = nn.Linear(8, 8), Slope(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(adjoint(self.slope, self.first(x), *self.slope.parameters()))


def around(inside: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), inside(), nn.Linear(8, 3))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [around(Ode), AtTheTop], ids=["inside", "top"])
def test_a_module_that_backward_calls(make: Callable[[], nn.Module], way: str) -> None:
    assert_equal_calls(make, CALLS, way)


@script
def by_rows(x: Tensor) -> Tensor:
    if x.size(0) > 5:
        return x * 2
    return x * 3


@script
def by_value(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x * 3


@script
def in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 1
    y.add_(1.0)
    return y, x.sum(1)


def two_results(x: Tensor) -> Tensor:
    first, second = in_place(x)
    return first * second[:, None]


SCRIPTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sizes": by_rows,
    "values": by_value,
    "two results": two_results,
}


class Scripted(nn.Module):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(SCRIPTS[self.function](self.first(x)))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_of_torchscript(name: str, way: str) -> None:
    assert_equal_calls(lambda: Scripted(name), CALLS, way)


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden = nn.Linear(8, 8), [torch.jit.script(nn.Linear(8, 8))]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.first(x))


def test_a_hidden_module_of_torchscript_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"hidden\[0\]: is TorchScript"):
        lower(Hides(), (torch.randn(4, 8),))
