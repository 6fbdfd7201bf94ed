"""A dry run decides whether a plan fits if the estimate is near a budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from placements import estimated_plan
from torch import nn

import placer
from placer import api
from placer.errors import BudgetError
from placer.executor.distributed.job.assignment import Job
from placer.planner.build import build_plan
from placer.program import lower
from placer.simulation import judge
from placer.simulation.simulate import dry_run

pytestmark = pytest.mark.usefixtures("one_capture")

X = torch.empty(2, 8, 16, 16, device="meta")
SHARE = 0.1  # how much too low, or too high, the estimates of these tests are


@cache
def chain() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()) for _ in range(6)))


def spec_of(nbytes: int, **fields: Any) -> dict[str, Any]:
    devices = [{"name": f"cpu:{i}", "memory": nbytes} for i in range(2)]
    return {"devices": devices, "reserve": 0, "objective": "memory", **fields}


@pytest.fixture
def peak() -> int:
    """The largest peak of the best plan for two devices, for which estimates are exact."""
    return max(d.peak for d in placer.make_plan(chain(), spec_of(2**30), (X,)).devices)


def mislead(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Multiply the estimates of plans by ``factor``."""

    def build(*args: Any, **kwargs: Any) -> placer.Plan:
        plan = build_plan(*args, **kwargs)
        devices = tuple(replace(d, peak=int(factor * d.peak)) for d in plan.devices)
        return replace(plan, devices=devices, fits=all(d.fits for d in devices))

    monkeypatch.setattr(judge, "build_plan", build)


def really_fits(plan: placer.Plan) -> bool:
    report = placer.simulate(chain(), plan, (X,))
    budgets = {device.device: device.budget for device in plan.devices}
    return all(d.peak <= (budgets[d.device] or 0) for d in report.devices)


@pytest.mark.usefixtures("no_remedies")
def test_a_plan_that_only_seems_to_fit_does_not(monkeypatch: pytest.MonkeyPatch, peak: int) -> None:
    spec = spec_of(int((1 - SHARE / 2) * peak))
    mislead(monkeypatch, 1 - SHARE)
    plan = placer.make_plan(chain(), spec, (X,))
    assert not plan.fits
    assert not really_fits(plan)
    assert plan.overflow_bytes == peak - int((1 - SHARE / 2) * peak)  # by the dry run's figures
    assert plan.notes[-1] == "Estimates said that it fits; peaks are a dry run's."
    with pytest.raises(BudgetError):
        placer.compile(chain(), spec, (X,))


def test_it_is_planned_again_within_what_the_dry_run_leaves(
    monkeypatch: pytest.MonkeyPatch, peak: int
) -> None:
    budget = int(1.2 * peak)
    uneven = {**dict.fromkeys("0123", "cpu:0"), **dict.fromkeys("45", "cpu:1")}
    corrections = []

    def build(program: Any, spec: placer.PlacementSpec, *args: Any, **kwargs: Any) -> placer.Plan:
        corrections.append(kwargs.get("corrections", {}))
        assert spec.devices[0].memory == budget  # what the user wrote, in every round
        if len(corrections) > 1:
            return build_plan(program, spec, *args, **kwargs)
        plan = build_plan(program, spec.with_layers(uneven), *args, **kwargs)
        assert max(device.peak for device in plan.devices) > budget
        devices = tuple(replace(d, peak=min(d.peak, budget)) for d in plan.devices)
        return replace(plan, devices=devices, fits=True)

    monkeypatch.setattr(judge, "build_plan", build)
    plan = placer.make_plan(chain(), spec_of(budget), (X,))
    assert corrections[0] == {} and corrections[1]["cpu:0"] > 0
    assert plan.fits
    assert really_fits(plan)
    assert {device.budget for device in plan.devices} == {budget}


def test_a_plan_that_needs_far_more_than_its_estimate_is_not_planned_again(
    monkeypatch: pytest.MonkeyPatch, peak: int
) -> None:
    mislead(monkeypatch, 0.5)
    built, build = [], judge.build_plan
    monkeypatch.setattr(judge, "build_plan", lambda *a, **k: built.append(k) or build(*a, **k))
    plan = placer.make_plan(chain(), spec_of(int(0.54 * peak)), (X,))
    assert plan.overflow_bytes == peak - int(0.54 * peak)
    assert len(built) == 1


def test_a_plan_that_does_not_fit_with_corrections_gets_no_dry_run(
    monkeypatch: pytest.MonkeyPatch, peak: int
) -> None:
    budget, runs = int((1 - SHARE / 2) * peak), []
    uneven = {**dict.fromkeys("0123", "cpu:0"), **dict.fromkeys("45", "cpu:1")}

    def build(program: Any, spec: placer.PlacementSpec, *args: Any, **kwargs: Any) -> placer.Plan:
        wanted = spec.with_layers(uneven) if kwargs.get("corrections") else spec
        plan = build_plan(program, wanted, *args, **kwargs)
        devices = [replace(d, peak=min(int((1 - SHARE) * d.peak), budget)) for d in plan.devices]
        return replace(plan, devices=tuple(devices), fits=True)

    monkeypatch.setattr(judge, "build_plan", build)
    monkeypatch.setattr(judge, "dry_run", lambda *a, **k: runs.append(a) or dry_run(*a, **k))
    assert not placer.make_plan(chain(), spec_of(budget), (X,)).fits
    assert len(runs) == 1


def test_a_plan_that_only_seems_not_to_fit_does(monkeypatch: pytest.MonkeyPatch, peak: int) -> None:
    spec = spec_of(int((1 + SHARE / 2) * peak))
    mislead(monkeypatch, 1 + SHARE)
    plan = placer.make_plan(chain(), spec, (X,))
    assert plan.fits
    assert really_fits(plan)
    assert max(device.peak for device in plan.devices) == peak


def test_far_from_the_budgets_no_dry_run_is_made(
    monkeypatch: pytest.MonkeyPatch, peak: int
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dry run")

    monkeypatch.setattr(judge, "dry_run", refuse)
    assert placer.make_plan(chain(), spec_of(2 * peak), (X,)).fits
    assert not placer.make_plan(chain(), spec_of(peak // 2), (X,)).fits
    with pytest.raises(AssertionError, match="a dry run"):
        placer.make_plan(chain(), spec_of(peak), (X,))


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("fields", "device"),
    [
        ({"optimizer": "adam"}, "cuda"),
        ({"optimizer": "sgd_momentum", "microbatches": 2, "schedule": "1F1B"}, "cuda"),
        ({"optimizer": "sgd", "checkpoint": ["1", "2"], "offload": ["4"]}, "cuda"),
        ({"optimizer": "adamw"}, "cpu"),
        ({"training": False}, "cuda"),
        ({"replicas": 2, "devices": ["cuda:0"], "replica_devices": [["cuda:1"]]}, "cuda"),
    ],
)
def test_steps_made_of_one_are_those_that_are_run(fields: dict[str, Any], device: str) -> None:
    """Linear layers have more state than activations, so the optimizer's step is a peak too."""
    x = torch.empty(4, 8, 16, 16, device="meta")
    with torch.device("meta"):
        wide = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16), nn.BatchNorm2d(8))
    for model in (chain(), wide):
        spec = placer.load_spec({"devices": [f"{device}:0", f"{device}:1"], **fields})
        if model is wide:
            spec = spec.model_copy(update={"checkpoint": (), "offload": ()})
        program = lower(model, (x,))
        plan = build_plan(program, spec, [x])
        every = dry_run(program, plan, [x], once=False)
        made = dry_run(program, plan, [x])
        assert made(plan.devices) == every(plan.devices)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"microbatches": 2, "schedule": "1F1B"},
        {"optimizer": "sgd_momentum", "microbatches": 4, "schedule": "InterleavedZeroBubble"},
        {"replicas": 2, "checkpoint": ["1", "2"], "offload": ["4"]},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_of_a_rank_made_of_one_are_those_that_are_run(
    fields: dict[str, Any], device: str
) -> None:
    x = torch.empty(8, 8, 16, 16, device="meta")
    spec = placer.load_spec({"devices": [f"{device}:0", f"{device}:1"], **fields})
    program = lower(chain(), (x,))
    plan = build_plan(program, spec, [x], processes=True)
    every = dry_run(program, plan, [x], processes=True, once=False)
    made = dry_run(program, plan, [x], processes=True)
    assert made(plan.devices) == every(plan.devices)


@pytest.mark.usefixtures("no_remedies")
def test_in_a_job_the_allocator_decides_what_fits_on_a_gpu() -> None:
    """The allocator of the fuller rank reserves too much; its tensors alone would fit."""
    program = lower(chain(), (X,))
    job = Job(rank=1, world_size=2, local_rank=1)

    def spec(nbytes: int) -> placer.PlacementSpec:
        devices = [{"name": f"cuda:{i}", "memory": nbytes} for i in range(2)]
        layers = {**dict.fromkeys("0123", "cuda:0"), **dict.fromkeys("45", "cuda:1")}
        return placer.load_spec({"devices": devices, "reserve": 0, "context": 0, "layers": layers})

    _, plan = api._plan_or_refuse(spec(2**30), program, [X], job)
    first = plan.devices[0]
    assert first.reserved is not None and first.reserved > first.peak + first.workspaces
    between = (first.peak + first.workspaces + first.reserved) // 2
    estimates = estimated_plan(chain(), spec(between), (X,))
    assert estimates.fits
    for wanted in (spec(between), estimates):
        with pytest.raises(BudgetError, match="cuda:0"):
            api._plan_or_refuse(wanted, program, [X], job)


def test_a_number_of_shards_that_auto_cannot_try_is_named() -> None:
    with torch.device("meta"):
        model, x = nn.Conv2d(1, 64, 3, padding=1), torch.empty(1, 1, 2, 2)
    devices = [{"name": f"cpu:{i}", "memory": "2KiB"} for i in range(8)]
    plan = placer.make_plan(model, {"devices": devices, "space": "auto"}, x)
    assert '"space": 8 is not possible: input has 2x2 positions in space' in "\n".join(plan.notes)
