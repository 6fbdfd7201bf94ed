"""Compares simulated peaks of a step on the CPU with a real step, by the allocator's own events.

These cases were wrong in the ledger once.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import placer
from benchmarks.allocator import allocator_peaks
from placer.cost import mean_square


def check(model: nn.Module, x: Tensor, **fields: Any) -> placer.Plan:
    plan = placer.make_plan(model, {"devices": ["cpu:0"], "loss": "mean_square", **fields}, (x,))
    (simulated,) = placer.simulate(model, plan, (x,)).devices
    assert simulated.predicted == pytest.approx(simulated.peak, rel=0.01)
    measured = allocator_peaks(model, plan, (x,), loss_fn=mean_square).tensors
    assert simulated.peak == pytest.approx(measured, rel=0.01)


def test_a_group_norm_in_half_gives_gradients_in_half() -> None:
    block = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(2, 8))
    model = nn.Sequential(block, nn.Conv3d(8, 1, 1))
    check(model, torch.randn(1, 1, 24, 24, 24), precision="bf16")


def test_an_lstm_keeps_a_workspace_for_backward() -> None:
    """The LSTM's workspace is 40 times the input; everything else is proportional to input and output."""
    check(models.Recurrent(), torch.randn(240, 40, 3))
