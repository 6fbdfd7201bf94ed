"""Predicted against simulated bytes where regions are recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Iterator

import models
import pytest
import torch
from captured import captured_once
from placements import estimated_plan
from torch import nn
from unet3d import unet3d

import placer


@pytest.fixture(autouse=True, scope="module")
def _one_capture() -> Iterator[None]:
    with captured_once():
        yield


CASES: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], list[list[str]]]] = {
    "unet": (
        unet3d(width=8, depth=3),
        (torch.randn(4, 1, 32, 32, 32),),
        [["encoder.*"], ["decoder"], ["*coder.*.0", "*coder.*.1", "*coder.*.3", "*coder.*.4"]],
    ),
    "in place": (
        models.InPlace(),
        (torch.randn(12, 2, 32, 32),),
        [["bn", "relu", "shared"], ["first", "bn", "last"]],
    ),
    "transformer": (
        models.TiedTransformer(width=32),
        (torch.randint(0, 17, (12, 6)),),
        [["blocks.*"]],
    ),
}


def _peaks(name: str, stages: int, microbatches: int = 1, **fields: object) -> tuple[int, ...]:
    """Peaks of a plan, checked against the simulation."""
    model, args, _ = CASES[name]
    devices = [f"cuda:{i}" for i in range(stages)]
    spec = {"devices": devices, "microbatches": microbatches, "optimizer": "sgd", **fields}
    plan = estimated_plan(model, spec, args)
    for device in placer.simulate(model, plan, args).devices:
        assert device.peak == pytest.approx(device.predicted, rel=0.01), (fields, device)
    return tuple(device.peak for device in plan.devices)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", CASES)
def test_recomputed_regions_are_predicted_within_one_percent(name: str) -> None:
    for patterns in CASES[name][2]:
        _peaks(name, 1, checkpoint=patterns)
        _peaks(name, 2, checkpoint=patterns)
    if name != "transformer":
        _peaks(name, 3, 2, checkpoint=CASES[name][2][0])


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", CASES)
def test_offloaded_regions_are_predicted_within_one_percent(name: str) -> None:
    _peaks(name, 1, offload=CASES[name][2][0])
    _peaks(name, 1, checkpoint=CASES[name][2][0], offload=CASES[name][2][0])


def test_both_need_less() -> None:
    (plain,) = _peaks("unet", 1)
    (recomputed,) = _peaks("unet", 1, checkpoint=["encoder.*"])
    (offloaded,) = _peaks("unet", 1, offload=["encoder.*"])
    assert recomputed < 0.8 * plain and offloaded < 0.8 * plain


def test_both_cost_time() -> None:
    model, _, _ = CASES["unet"]
    args = (torch.empty(1, 1, 160, 160, 160, device="meta"),)  # launching takes less
    device = {"name": "cuda:0", "memory": "80GiB", "kind": "a100"}
    plain = placer.make_plan(model, {"devices": [device]}, args)
    for field in ("checkpoint", "offload"):
        slower = placer.make_plan(model, {"devices": [device], field: ["encoder.*"]}, args)
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
