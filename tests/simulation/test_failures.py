"""Models and losses that fail in a dry run raise one ``CaptureError``, not an exception of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import placer


class Overwrites(nn.Module):
    """It overwrites the tensor that the backward of ``sigmoid`` needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.first(x).sigmoid()
        gate.add_(1)
        return self.last(gate)


@pytest.mark.parametrize("processes", [False, True])
def test_a_backward_that_autograd_refuses_is_said_when_planning(processes: bool) -> None:
    model, x = Overwrites(), torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    spec = {"devices": ["cuda:0", "cuda:1"]}
    with pytest.raises(placer.CaptureError, match="modified by an inplace operation") as error:
        placer.make_plan(model, spec, x, processes=processes)
    assert error.value.where == "the model" and '"training": false' in error.value.remedy
    assert placer.make_plan(model, spec | {"training": False}, x, processes=processes).stages


def test_a_loss_that_fails_is_said_when_simulating() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(4, 4)
    plan = placer.make_plan(model, {"devices": ["cuda:0", "cuda:1"]}, x, processes=True)

    def loss_fn(output: Tensor) -> Tensor:
        raise KeyError("labels")

    for processes in (False, True):
        with pytest.raises(
            placer.CaptureError, match="loss <loss_fn>: fails in a dry run: KeyError"
        ):
            placer.simulate(model, plan, x, loss_fn=loss_fn, processes=processes)
