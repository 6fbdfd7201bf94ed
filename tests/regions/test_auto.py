"""``checkpoint: "auto"`` and ``offload: "auto"``: the plan fits, at the least extra time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from oracle import assert_same
from placements import estimated_plan
from torch import nn
from unet3d import unet3d

import placer
from placer.planner import activation_policy

pytestmark = pytest.mark.usefixtures("one_capture")

D = torch.float64
UNET = (unet3d(width=8, depth=2), (torch.randn(4, 1, 32, 32, 32),))


def _plan(
    model: nn.Module,
    args: Any,
    budget: int | None,
    stages: int = 1,
    device: str = "cpu",
    **fields: Any,
) -> placer.Plan:
    devices = [{"name": f"{device}:{i}"} for i in range(stages)]
    devices = [d if budget is None else {**d, "memory": budget} for d in devices]
    fixed = {"reserve": 0, "optimizer": "sgd", "objective": "memory", "loss": "mean_square"}
    fields = {**fixed, **fields}
    return placer.make_plan(model, {"devices": devices, **fields}, args)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "fields",
    [{"checkpoint": "auto"}, {"offload": "auto"}, {"checkpoint": "auto", "offload": "auto"}],
)
def test_the_plan_fits_a_budget_that_is_too_small_otherwise(fields: dict[str, str]) -> None:
    model, args = UNET
    base = _plan(model, args, None)
    budget = int(0.7 * base.devices[0].peak)
    assert not _plan(model, args, budget).fits
    plan = _plan(model, args, budget, **fields)
    assert plan.fits
    (device,) = placer.simulate(model, plan, args).devices
    assert device.peak <= 1.01 * budget
    assert plan.step_seconds > base.step_seconds
    assert plan.checkpoint or plan.offload
    (note,) = (n for n in plan.notes if "auto" in n)
    assert "adds" in note and plan.extra_seconds > 0
    assert "extra seconds of a micro-batch" in plan.explain()


def test_more_ways_to_save_memory_take_no_more_time() -> None:
    """Offloaded regions, too, end where memory is not shared between nodes, or else are given up."""
    model, args = UNET
    budget = int(0.9 * _plan(model, args, None).devices[0].peak)
    ways = {"checkpoint": "auto"}, {"offload": "auto"}, {"checkpoint": "auto", "offload": "auto"}
    found = [estimated_plan(model, _limited(budget, **way), args) for way in ways]
    assert all(plan.fits for plan in found)
    *single, both = [plan.step_seconds for plan in found]
    assert both <= min(single)
    assert found[1].devices[0].peak > 0.8 * budget  # no more is offloaded than has to be


def _limited(budget: int, **fields: Any) -> dict[str, Any]:
    devices = [{"name": "cpu:0", "memory": budget}]
    return {
        "devices": devices,
        "reserve": 0,
        "optimizer": "sgd",
        "objective": "throughput",
        **fields,
    }


def test_nothing_is_recomputed_where_all_fits() -> None:
    model, args = UNET
    plan = _plan(model, args, 2**40, checkpoint="auto", offload="auto")
    assert plan.fits and not plan.checkpoint and not plan.offload


def test_without_budgets_a_search_that_finds_worse_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the search of stages on devices that come again did."""
    worse: list[int] = []

    def find(self: Any, *given: Any) -> Any:
        found = real(self, *given)
        peaks = {device: 2 * peak for device, peak in found.partition.peaks.items()}
        worse.append(max(peaks.values()))
        return replace(found, partition=replace(found.partition, peaks=peaks))

    real = activation_policy._Search.found
    monkeypatch.setattr(activation_policy._Search, "found", find)
    spec = {"devices": ["cuda:0", "cuda:1"], "objective": "memory"}
    with torch.device("meta"):
        model, x = unet3d(width=4, depth=2), torch.empty(1, 1, 16, 16, 16)
    plain = max(device.peak for device in placer.make_plan(model, spec, x).devices)
    auto = placer.make_plan(model, spec | {"checkpoint": "auto"}, x)
    assert min(worse) > plain
    assert max(device.peak for device in auto.devices) == plain


def test_two_devices_hold_little_more_than_the_largest_operation() -> None:
    """Regions end between a BatchNorm and the ReLU in place after it, and a device gets two stages.

    The first convolution of the last level needs 1.25 GiB on its device.
    """
    with torch.device("meta"):
        model, x = unet3d(), torch.empty(1, 1, 128, 128, 128)
    spec = {"devices": ["cuda:0", "cuda:1"], "objective": "memory", "checkpoint": "auto"}
    plan = estimated_plan(model, spec, (x,))
    assert max(device.peak for device in plan.devices) <= 1.1 * 1.25 * 2**30
    for device in placer.simulate(model, plan, (x,)).devices:
        assert device.peak == pytest.approx(device.predicted, rel=0.01)


def test_boundaries_are_moved_to_where_they_are_best_for_the_lightest_stages() -> None:
    """After the last upsampling; before it, where they were, the second stage needs 50.1 MiB."""
    args = (torch.empty(1, 1, 64, 64, 64, device="meta"),)
    fields = {"objective": "throughput", "optimizer": "adam", "checkpoint": "auto"}
    assert _plan(UNET[0], args, 49 * 2**20, stages=2, **fields).fits


@pytest.mark.matrix(1)
@pytest.mark.parametrize("slices", ["replicas", "microbatches"])
def test_a_program_for_fewer_rows_recomputes_what_the_plan_says(slices: str) -> None:
    """A model that is split in space is recorded anew for the rows of a slice."""
    with torch.device("meta"):
        model, x = unet3d(width=4, depth=2), torch.empty(2, 1, 32, 32, 32)
    fields = {"space": 2, slices: 2, "objective": "throughput"}
    kept = max(device.peak for device in _plan(model, (x,), None, stages=2, **fields).devices)
    plan = _plan(model, (x,), int(0.8 * kept), stages=2, **fields, checkpoint="auto")
    assert plan.checkpoint
    for device in placer.simulate(model, plan, (x,)).devices:
        assert device.peak <= 0.81 * kept


def test_results_equal_eager() -> None:
    torch.manual_seed(0)
    model, x = models.InPlace().double(), torch.randn(8, 2, 5, 5, dtype=D)
    peaks = [d.peak for d in _plan(model, (x,), None, 2, device="cpu").devices]
    fields = {"checkpoint": "auto", "offload": "auto", "device": "cpu"}
    plan = _plan(model, (x,), int(0.9 * max(peaks)), 2, **fields)
    regions = [region for stage in plan.stages for region in stage.regions]
    assert any(region.recompute or region.offload for region in regions)
    free = tuple(replace(d, budget=None) for d in plan.devices)
    assert_same(model, replace(plan, devices=free), (x,))
