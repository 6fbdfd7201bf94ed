"""Predicted against simulated bytes where regions are recomputed or offloaded."""

from __future__ import annotations

import pytest
import torch
from placements import estimated_plan
from torch import nn
from unet3d import unet3d

import placer

pytestmark = pytest.mark.usefixtures("one_capture")


MODEL = unet3d(width=8, depth=3)


def _peak(**fields: object) -> int:
    """The peak of a plan, checked against the simulation; `benchmarks.memory_matrix` has all models."""
    x = torch.randn(4, 1, 32, 32, 32)
    spec = {"devices": ["cuda:0"], "optimizer": "sgd", **fields}
    plan = estimated_plan(MODEL, spec, (x,))
    (device,) = placer.simulate(MODEL, plan, (x,)).devices
    assert device.peak == pytest.approx(device.predicted, rel=0.01), (fields, device)
    return device.peak


def test_both_need_less() -> None:
    plain = _peak()
    some = ["*coder.*.0", "*coder.*.1", "*coder.*.3", "*coder.*.4"]
    assert _peak(checkpoint=["encoder.*"]) < 0.8 * plain
    _peak(checkpoint=some)  # is predicted; what is recomputed may take more
    assert _peak(offload=["encoder.*"]) < 0.8 * plain


def test_both_cost_time() -> None:
    args = (torch.empty(1, 1, 160, 160, 160, device="meta"),)  # launching takes less
    device = {"name": "cuda:0", "memory": "80GiB", "kind": "a100"}
    plain = placer.make_plan(MODEL, {"devices": [device]}, args)
    for field in ("checkpoint", "offload"):
        slower = placer.make_plan(MODEL, {"devices": [device], field: ["encoder.*"]}, args)
        assert slower.step_seconds > plain.step_seconds
        assert slower.step_seconds < 2 * plain.step_seconds or field == "offload"


def test_the_simulation_says_that_the_peak_is_in_a_recomputation() -> None:
    """A pooling at the end of the region: its forward holds more than its backward."""
    model = nn.Sequential(nn.Sequential(nn.Conv1d(1, 64, 1), nn.Tanh(), nn.MaxPool1d(64)))
    x = torch.randn(2, 1, 64 * 32)
    spec = {"devices": ["cuda:0"], "checkpoint": ["0"]}
    plan = estimated_plan(model, spec, (x,))
    (device,) = placer.simulate(model, plan, (x,)).devices
    assert device.peak == pytest.approx(device.predicted, rel=0.01)
    assert device.phase in ("recompute", "backward")
