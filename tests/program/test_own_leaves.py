"""Tensors that forward makes or keeps, and of which the caller reads the gradient afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn

import placer

TWO: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "layers": {"last": "cpu:1"}}
X = torch.randn(6, 4, dtype=torch.float64)


def _perturbs(part: Any, y: Tensor) -> Tensor:
    part.kept = torch.zeros(4, dtype=y.dtype, requires_grad=True)
    return y + part.kept


def _retains(part: Any, y: Tensor) -> Tensor:
    part.kept = y * 2
    if y.requires_grad:
        part.kept.retain_grad()
    result: Tensor = part.kept + 0
    return result


def _detaches(part: Any, y: Tensor) -> Tensor:
    part.kept = y.detach().requires_grad_()
    return part.kept * y


class Part(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4).double(), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x))


class Net(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.last = Part(act), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.part(x).tanh())
        return result


@pytest.mark.matrix(2)
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("act", [_perturbs, _retains, _detaches])
def test_it_has_its_gradient(act: Callable[[Any, Tensor], Tensor], step: bool) -> None:
    model = Net(act)
    placed = placer.compile(model, TWO, X)
    for _ in range(2):
        model(X).square().mean().backward()
        if step:
            placed.step(X, loss_fn=lambda y: y.square().mean())
        else:
            placed(X).square().mean().backward()
        assert model.part.kept.grad is not None
        assert_close(placed.part.kept.grad, model.part.kept.grad, "gradient of what is kept")


@pytest.mark.parametrize("act", [_perturbs, _retains, _detaches])
def test_slices_of_the_batch_are_refused(act: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(placer.PlacerError, match="kept"):
        placer.compile(Net(act), TWO | {"microbatches": 2}, X)(X)


@pytest.mark.parametrize("act", [_perturbs, _retains, _detaches])
def test_it_is_refused_in_the_model_itself(act: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(placer.CaptureError, match="kept"):
        placer.compile(Part(act), {"devices": ["cpu:0"]}, X)
