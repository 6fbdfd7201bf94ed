"""The memory of devices over time: the bytes of a dry run, at the seconds of the plan's step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.plan.step_spans import step_spans
from placer.program import lower
from placer.simulation.simulate import dry_run
from placer.timeline import OPTIMIZER

pytestmark = pytest.mark.usefixtures("one_capture")

WIDTH, LAYERS = 32, 4
PAIRS = {"GPipe": (0, 0, 1, 1), "interleaved": (0, 1, 0, 1)}
SPECS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "GPipe": {"microbatches": 4},
    "1F1B": {"microbatches": 4, "schedule": "1F1B"},
    "interleaved": {"microbatches": 4, "schedule": "Interleaved1F1B"},
    "zero bubble": {"microbatches": 4, "schedule": "InterleavedZeroBubble"},
    "replicas": {"microbatches": 2, "replicas": 2},
    "recompute": {"microbatches": 2, "schedule": "1F1B", "checkpoint": ["*"]},
    "offload": {"microbatches": 2, "offload": ["1"]},
    "sgd": {"optimizer": "sgd", "microbatches": 2},
    "inference": {"training": False, "microbatches": 2, "replicas": 2},
}


@cache
def model_and_rows() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        return nn.Sequential(*layers), torch.empty(64, WIDTH)


def spec_of(name: str, *, device: str = "cuda", kind: str | None = "h100") -> dict[str, Any]:
    devices = [{"name": f"{device}:{i}", **({"kind": kind} if kind else {})} for i in range(2)]
    places = PAIRS.get(name, PAIRS["GPipe"])
    layers = {str(i): f"{device}:{place}" for i, place in enumerate(places)}
    return {"devices": devices, "layers": layers, **SPECS[name]}


@pytest.mark.matrix(3)
@pytest.mark.matrix(2)
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_the_maximum_is_the_peak(name: str, processes: bool) -> None:
    model, x = model_and_rows()
    plan = placer.make_plan(model, spec_of(name), x, processes=processes)
    report = placer.simulate(model, plan, x, processes=processes)
    assert len(report.devices) == (2 if processes else 2 * plan.replicas)
    for device in report.devices:
        curve = device.memory_over_time
        assert max(point.nbytes for point in curve) == device.peak
        largest = max(curve, key=lambda point: point.nbytes)
        assert sum(each.nbytes for each in largest.layers) <= device.peak
        seconds = [point.seconds for point in curve]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0 and seconds[-1] == plan.step_seconds
        if plan.training and device.device in plan.stages[0].devices[:1]:
            assert curve[0].nbytes == curve[-1].nbytes  # a step leaves what it found


@pytest.mark.matrix(2)
@pytest.mark.matrix(2)
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_events_have_the_tasks_of_the_step(name: str, processes: bool) -> None:
    """Those outside of all tasks are of weights, inputs, results, and gradients of the caller's graph."""
    model, x = model_and_rows()
    program = lower(model, (x,))
    plan = placer.make_plan(model, spec_of(name), x, processes=processes)
    tasks = {span.task for span in step_spans(plan)} - {None}
    seen = set()
    for run in dry_run(program, plan, [x], processes=processes).found:
        for event in run.timeline.events:
            block = run.timeline.blocks[event.block]
            seen.add(event.task)
            if event.kind == "allocate" and block.where.phase == "optimizer":
                assert event.task == OPTIMIZER
            elif event.kind == "allocate" and block.where.node:
                assert event.task is not None and event.task.action is not None
    assert seen - {None} <= tasks
    for task in tasks - {OPTIMIZER}:
        # The half of a backward for weights may find everything that it needs.
        assert task in seen or (processes and task.replica) or task.action.kind == "W"


def test_without_times_every_task_is_as_long_as_any_other() -> None:
    """Forward, backward and optimizer of 4 micro-batches, on the first of two devices."""
    model, x = model_and_rows()
    plan = placer.make_plan(model, spec_of("GPipe", kind=None), x)
    device = placer.simulate(model, plan, x).devices[0]
    assert max(point.nbytes for point in device.memory_over_time) == device.peak
    assert device.memory_over_time[-1].seconds == 4 + 4 + 1
