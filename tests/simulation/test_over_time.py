"""The memory of devices over time: the bytes of a dry run, at the seconds of the plan's step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.plan.step_spans import step_spans
from placer.program import lower
from placer.simulation.simulate import dry_run
from placer.timeline import OPTIMIZER, end_of

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


def model_and_rows() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        return nn.Sequential(*layers), torch.empty(64, WIDTH)


def spec_of(name: str, *, device: str = "cuda", kind: str | None = "h100") -> dict[str, Any]:
    devices = [{"name": f"{device}:{i}", **({"kind": kind} if kind else {})} for i in range(2)]
    places = PAIRS.get(name, PAIRS["GPipe"])
    layers = {str(i): f"{device}:{place}" for i, place in enumerate(places)}
    return {"devices": devices, "layers": layers, **SPECS[name]}


@pytest.mark.matrix(6)
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
        seconds = [point.seconds for point in curve]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0 and seconds[-1] == plan.step_seconds
        if plan.training and device.device in plan.stages[0].devices[:1]:
            assert curve[0].nbytes == curve[-1].nbytes  # a step leaves what it found


@pytest.mark.matrix(6)
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


def test_1f1b_keeps_fewer_microbatches_than_gpipe_at_the_same_moments() -> None:
    """On the first of two devices: 4 and 2 micro-batches."""
    model, x = model_and_rows()
    saved = 64 // 4 * WIDTH * 4  # bytes of the result of one layer
    most = {}
    for name in ("GPipe", "1F1B"):
        plan = placer.make_plan(model, spec_of(name), x, processes=True)
        spans = step_spans(plan)
        first = placer.simulate(model, plan, x, processes=True).devices[0].memory_over_time
        start = {span.name: span.start for span in spans}
        at = {point.seconds: point.nbytes for point in first}
        most[name] = at[start["0B0"]]
        forwards = [at[start[f"0F{m}"]] for m in range(2)]
        assert forwards[1] - forwards[0] >= saved  # the micro-batch before is kept
        assert first[-1].seconds == end_of(spans)
    assert most["GPipe"] - most["1F1B"] >= 2 * saved


def test_without_times_there_is_no_curve() -> None:
    model, x = model_and_rows()
    plan = placer.make_plan(model, spec_of("GPipe", kind=None), x)
    report = placer.simulate(model, plan, x)
    assert [device.memory_over_time for device in report.devices] == [(), ()]


def test_points_are_two_for_each_task() -> None:
    """One device, one micro-batch: forward, backward, optimizer."""
    model, x = model_and_rows()
    plan = placer.make_plan(model, {"devices": [{"name": "cuda:0", "kind": "h100"}]}, x)
    (device,) = placer.simulate(model, plan, x).devices
    forward, backward, optimizer = step_spans(plan)
    times = [
        0,
        forward.start,
        forward.end,
        backward.start,
        backward.end,
        optimizer.start,
        optimizer.end,
    ]
    assert [p.seconds for p in device.memory_over_time] == [*times, *times[-1:] * 2]
    weights = sum(p.numel() * 4 for p in model.parameters())
    state = device.memory_over_time[0].nbytes
    assert state >= 3 * weights  # with Adam's two moments
    ends = [p.nbytes for p in device.memory_over_time[2::2]]
    saved, gradients = ends[0] - state, ends[1] - state
    assert saved >= LAYERS * x.numel() * 4 and gradients >= weights
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(device.memory_over_time))
