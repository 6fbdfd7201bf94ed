"""``retain_grad()`` in forward: right, or refused where the caller would get a copy of the tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from other_inputs import CUT, UNCUT, WAYS, compile_way
from torch import Tensor, nn

import placer

D = torch.float64


class Retains(nn.Module):
    """A layer; ``of`` is the tensor whose gradient it retains, ``keeps`` how the caller gets it."""

    def __init__(self, of: str, keeps: str = "") -> None:
        super().__init__()
        self.linear, self.of, self.keeps = nn.Linear(4, 4), of, keeps

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        {"input": x, "result": y}[self.of].retain_grad()
        if self.keeps == "attribute":
            self.kept = y
        return y if self.keeps == "returned" else y.tanh()


class Net(nn.Module):
    def __init__(self, of: str, keeps: str = "") -> None:
        super().__init__()
        self.first, self.inner, self.last = (
            nn.Linear(4, 4),
            Retains(of, keeps),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x if self.inner.of == "input" else self.first(x))
        return (self.last(y.tanh()), y) if self.inner.keeps == "returned" else self.last(y)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_result_of_a_submodule_is_refused(way: str) -> None:
    with pytest.raises(placer.CaptureError, match=r"calls retain_grad.*test_retained.py:\d+"):
        compile_way(Net("result", "returned").double(), (torch.randn(4, 4, dtype=D),), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [Net, Retains])
def test_an_input_is_refused(make: type[nn.Module], way: str) -> None:
    x = torch.randn(4, 4, dtype=D, requires_grad=True)
    with pytest.raises(placer.CaptureError, match=r"on an input .*test_retained.py:\d+"):
        compile_way(make("input").double(), (x,), way)


@pytest.mark.parametrize("way", CUT)
def test_slices_of_a_result_of_the_model_are_refused(way: str) -> None:
    with pytest.raises(placer.CaptureError, match=r"retains a gradient .*test_retained.py:\d+"):
        compile_way(Retains("result", "returned").double(), (torch.randn(4, 4, dtype=D),), way)


def test_one_slice_of_a_result_of_the_model() -> None:
    model, x = Retains("result", "returned").double(), torch.randn(4, 4, dtype=D)
    y = compile_way(model, (x,), "stages")(x)
    y.square().sum().backward()
    torch.testing.assert_close(y.grad, 2 * y.detach())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("way", UNCUT)
def test_an_attribute(way: str) -> None:
    model, x = Net("result", "attribute").double(), torch.randn(4, 4, dtype=D)
    placed = compile_way(model, (x,), way)
    grads = []
    for net in (model, placed):
        net(x).square().sum().backward()
        grads.append(net.inner.kept.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_nobody_gets(way: str) -> None:
    model, x = Net("result").double(), torch.randn(4, 4, dtype=D)
    torch.testing.assert_close(compile_way(model, (x,), way)(x), model(x))
