"""When everything in a step runs: schedules drawn in time, by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from placements import estimated_plan
from plans import make_plan
from torch import nn

import placer
from placer.machine.devices import device_kind
from placer.plan.step_spans import step_spans
from placer.plan.types import Plan, Transfer
from placer.report.trace import step_trace
from placer.schedule import SCHEDULES
from placer.timeline import Span, end_of


def stages_of(count: int, *, devices: int = 0, **fields: Any) -> tuple[Any, ...]:
    """Stages of 1 s forward and 2 s backward, dealt out to the devices in turn."""
    first = make_plan().stages[0]
    return tuple(
        dataclasses.replace(first, index=i, devices=(f"cuda:{i % (devices or count)}",), **fields)
        for i in range(count)
    )


def plan_of(count: int, *, seconds: float = 0, devices: int = 0, **fields: Any) -> Plan:
    """A chain of such stages, each handing a value to the next that takes ``seconds`` to get there."""
    launching = {key: fields.pop(key) for key in list(fields) if key.endswith("launch_seconds")}
    transfers = tuple(
        Transfer(value=f"x{i}", source=i, target=i + 1, nbytes=8, seconds=seconds)
        for i in range(count - 1)
    )
    stages = stages_of(count, devices=devices, **launching)
    return dataclasses.replace(make_plan(), stages=stages, transfers=transfers, **fields)


def drawing(spans: tuple[Span, ...], device: str) -> str:
    """What the device computes: an action and when it starts."""
    found = [s for s in spans if s.kind == "compute" and s.on == (device,)]
    return " ".join(f"{s.name}@{s.start:g}" for s in found)


def seconds_of(plan: Plan, forward: Fraction, backward: Fraction) -> Fraction:
    """The seconds of a step whose passes take so long, and whose transfers take no time."""
    exact = {"forward_seconds": forward, "backward_seconds": backward}
    exact |= dict.fromkeys(["forward_launch_seconds", "backward_launch_seconds"], Fraction(0))
    stages = tuple(dataclasses.replace(s, **exact) for s in plan.stages)
    return end_of(step_spans(dataclasses.replace(plan, stages=stages)))


# Seconds of a step with P devices, M micro-batches, and V stages on each device
CLOSED_FORMS: dict[str, tuple[int, Callable[..., Fraction]]] = {
    # Huang et al. 2019, arXiv:1811.06965, and Narayanan et al. 2021, arXiv:2006.09503
    "GPipe": (1, lambda P, M, V, f, b: (M + P - 1) * (f + b)),
    "1F1B": (1, lambda P, M, V, f, b: (M + P - 1) * (f + b)),
    # Narayanan et al. 2021, arXiv:2104.04473, where P divides M
    "Interleaved1F1B": (2, lambda P, M, V, f, b: (M * V + P - 1) * (f + b)),
    # Qi et al. 2023, arXiv:2401.10241, with equal halves, where M >= P and b / 2 <= f
    "InterleavedZeroBubble": (1, lambda P, M, V, f, b: M * (f + b) + (P - 1) * f),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("schedule", CLOSED_FORMS)
@pytest.mark.parametrize("devices", range(1, 17))
def test_closed_forms_come_out_exactly(devices: int, schedule: str) -> None:
    """A process per device, from 1 to 64 micro-batches."""
    per_device, closed_form = CLOSED_FORMS[schedule]
    forward, backward = Fraction(5, 7), Fraction(4, 3)
    plan = plan_of(devices * per_device, devices=devices, schedule=schedule, processes=True)
    apply = {
        "Interleaved1F1B": lambda count: count % devices == 0,
        "InterleavedZeroBubble": lambda count: count >= devices,
    }.get(schedule, lambda count: True)
    for count in filter(apply, (1, 2, 3, 5, 8, 12, 16, 30, 64)):
        found = seconds_of(dataclasses.replace(plan, microbatches=count), forward, backward)
        assert found == closed_form(devices, count, per_device, forward, backward)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_every_action_follows_what_it_depends_on(
    count: int, devices: int, microbatches: int, schedule: str, processes: bool
) -> None:
    """Also where there is no closed form: few micro-batches, uneven stages, any split over devices."""
    seconds, rng = Fraction(1, 3), random.Random(count)
    plan = plan_of(count, devices=min(devices, count), seconds=seconds, microbatches=microbatches,
                   schedule=schedule, processes=processes)  # fmt: skip
    uneven = [
        dataclasses.replace(
            stage,
            forward_seconds=Fraction(rng.randint(1, 9), 7),
            backward_seconds=Fraction(rng.randint(1, 9), 5),
        )
        for stage in plan.stages
    ]
    plan = dataclasses.replace(plan, stages=tuple(uneven))
    spans = step_spans(plan)
    at: dict[tuple[str, int, int], Span] = {}
    for span in spans:
        if span.task is not None:
            action = span.task.action
            assert str(action) == span.name
            at[action.kind, action.stage_index, action.microbatch_index] = span
    for (kind, stage, microbatch), span in at.items():
        assert span.on == plan.stages[stage].devices
        needed = {
            "F": [("F", stage - 1)],
            "B": [("F", stage), ("B", stage + 1)],
            "I": [("F", stage), ("I", stage + 1)],
            "W": [("I", stage)],
        }[kind]
        for before, other in needed:
            if (before, other, microbatch) in at:
                made = at[before, other, microbatch]
                moved = seconds if made.on != span.on else 0
                assert span.start >= made.end + moved
    for name in {name for span in spans for name in span.on}:
        own = [span for span in spans if name in span.on]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    work = sum(microbatches * (s.forward_seconds + s.backward_seconds) for s in plan.stages)
    assert sum(span.end - span.start for span in at.values()) == work


def test_replicas_with_processes_of_their_own_are_alike() -> None:
    """In one process they share its launches instead."""
    launching = {"forward_launch_seconds": 0.75, "backward_launch_seconds": 0.5}
    plan = plan_of(
        2, microbatches=3, processes=True, seconds=0.5, optimizer_seconds=1.0, **launching
    )
    rows = [(f"cuda:{2 * r}", f"cuda:{2 * r + 1}") for r in range(3)]

    def spans_on(rows: list[tuple[str, ...]], processes: bool) -> tuple[Span, ...]:
        stages = tuple(
            dataclasses.replace(stage, devices=tuple(row[stage.index] for row in rows))
            for stage in plan.stages
        )
        return step_spans(
            dataclasses.replace(plan, stages=stages, replicas=len(rows), processes=processes)
        )

    spans = spans_on(rows, True)
    for replica, row in enumerate(rows):
        alone = [
            span._replace(task=span.task and span.task._replace(replica=replica))
            for span in spans_on([row], True)
        ]
        assert [span for span in spans if any(name.startswith(row) for name in span.on)] == alone
    alone, together = (end_of(spans_on(r, False)) for r in (rows[:1], rows))
    assert end_of(spans) < alone < together


def test_messages_travel_beside_computations_and_copies_do_not() -> None:
    """A message of 1 s delays only what waits for it; a copy stops both of its devices."""
    processes, one = (
        step_spans(plan_of(2, seconds=1.0, microbatches=2, processes=processes))
        for processes in (True, False)
    )
    assert drawing(processes, "cuda:0") == "0F0@0 0F1@1 0B0@7 0B1@9"
    assert drawing(processes, "cuda:1") == "1F0@2 1F1@3 1B0@4 1B1@6"
    assert drawing(one, "cuda:0") == "0F0@0 0F1@2 0B0@8 0B1@11"
    assert drawing(one, "cuda:1") == "1F0@2 1F1@4 1B0@5 1B1@8"
    assert {s.on for s in processes if s.kind == "transfer"} == {
        ("cuda:0 to cuda:1",),
        ("cuda:1 to cuda:0",),
    }


def test_a_value_goes_to_a_device_once() -> None:
    """Two stages on a device read it: it travels to the first, and its gradient from there."""
    plan = plan_of(4, devices=2, processes=True)
    again = Transfer(value="x0", source=0, target=3, nbytes=8, seconds=5.0)
    with_skip = dataclasses.replace(plan, transfers=(*plan.transfers, again))
    assert step_spans(with_skip) == step_spans(plan)
    another_value = dataclasses.replace(again, value="y")
    other = dataclasses.replace(plan, transfers=(*plan.transfers, another_value))
    assert end_of(step_spans(other)) > end_of(step_spans(plan))


def test_replicas_in_one_process_wait_for_it() -> None:
    plan = plan_of(1, microbatches=2)
    two = tuple(dataclasses.replace(s, devices=("cuda:0", "cuda:1")) for s in plan.stages)
    side_by_side = dataclasses.replace(plan, stages=two, replicas=2)
    assert end_of(step_spans(side_by_side)) == end_of(step_spans(plan)) == 6.0
    busy = tuple(
        dataclasses.replace(s, forward_launch_seconds=1.0, backward_launch_seconds=2.0) for s in two
    )
    assert end_of(step_spans(dataclasses.replace(side_by_side, stages=busy))) == 12.0


def test_inference_has_forwards_only_and_an_optimizer_comes_last() -> None:
    spans = step_spans(plan_of(2, microbatches=2, training=False))
    assert [s.name for s in spans if s.kind == "compute"] == ["0F0", "1F0", "0F1", "1F1"]
    last = step_spans(plan_of(2, microbatches=2, optimizer_seconds=0.5))[-1]
    assert (last.kind, last.end - last.start) == ("optimizer", 0.5)
    assert last.on == ("cuda:0", "cuda:1")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("processes", [False, True])
def test_a_plans_step_is_its_spans(processes: bool) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    devices = [{"name": f"cuda:{i}", "kind": "a100"} for i in range(2)]
    spec: dict[str, Any] = {"devices": devices, "microbatches": 4, "schedule": "1F1B"}
    spec["layers"] = {"0": "cuda:0", "1": "cuda:0", "2": "cuda:1", "3": "cuda:1"}
    plan = placer.make_plan(model, spec, (torch.empty(64, 64),), processes=processes)
    assert plan.step_seconds == end_of(step_spans(plan)) > plan.optimizer_seconds > 0
    (transfer,) = plan.transfers
    assert transfer.seconds > 0
    # What the devices of a CPU compute, one process computes, one thing after the other.
    cpus = {**spec, "devices": ["cpu:0", "cpu:1"], "layers": {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1",
            "3": "cpu:1"}}  # fmt: skip
    on_cpu = estimated_plan(model, cpus, (torch.empty(64, 64),))
    work = 4 * sum(s.forward_seconds + s.backward_seconds for s in on_cpu.stages)
    assert on_cpu.step_seconds >= work + on_cpu.optimizer_seconds - 1e-12


@pytest.mark.matrix(2)
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plans_step_counts_the_launches_of_all_replicas(device: str, processes: bool) -> None:
    """In one process, which runs replicas on CPUs one after the other."""
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.empty(64, 64)
    kind = {} if device == "cpu" else {"kind": "a100"}
    spec = {"devices": [{"name": f"{device}:{i}", **kind} for i in range(2)], "microbatches": 4}
    one, two = (
        placer.make_plan(
            model, {**spec, "replicas": count}, (x[: 32 * count],), processes=processes
        )
        for count in (1, 2)
    )
    assert two.step_seconds == two.optimality.value == end_of(step_spans(two))
    computing = two.step_seconds - two.optimizer_seconds
    alone = one.step_seconds - one.optimizer_seconds
    assert computing == pytest.approx(alone if processes else 2 * alone, rel=0.05)


def _offloading(overlap: bool, width: int = 64) -> Plan:
    """Three products in one stage, all of whose results go to the host."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    with torch.device("meta"):
        model, x = nn.Sequential(*layers), torch.empty(2**20, width)
    spec = {"devices": [{"name": "cuda:0", "kind": "h100"}], "offload": ["*"]}
    return estimated_plan(model, {**spec, "offload_overlap": overlap}, (x,))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("width", [64, 8192])
def test_copies_to_the_host_are_beside_the_computations_or_among_them(width: int) -> None:
    """Narrow layers wait for the link in both passes; wide ones take no longer than without copies."""
    apart, beside = (_offloading(overlap, width) for overlap in (False, True))
    assert not any(span.kind == "transfer" for span in step_spans(apart))
    there, back = (span for span in step_spans(beside) if span.kind == "transfer")
    assert there.on == ("cuda:0 to the host",) and back.on == ("the host to cuda:0",)
    assert beside.host is not None and there.nbytes == back.nbytes == beside.host.peak
    one_way = beside.host.peak / device_kind("cuda:0", "h100").host_bandwidth
    assert there.end - there.start == pytest.approx(one_way)
    (slow,), (fast,) = apart.stages, beside.stages
    for name, copy in (("forward", there), ("backward", back)):
        (computed,) = (s for s in step_spans(beside) if s.name == f"0{name[0].upper()}0")
        assert copy.start == computed.start and copy.end <= computed.end * (1 + 1e-9)
        before, now = (getattr(stage, f"{name}_seconds") for stage in (slow, fast))
        computing = before - one_way
        assert max(computing, one_way) <= now < before
        if width == 64:
            assert now < 1.4 * one_way  # the first tensor of a pass has nothing beside it
        else:
            assert now < computing + 0.7 * one_way  # a copy waits for the one before it
    assert beside.step_seconds == end_of(step_spans(beside)) < apart.step_seconds
    rows = [
        e["args"]["name"] for e in step_trace(beside)["traceEvents"] if e["name"] == "thread_name"
    ]
    assert rows == ["cuda:0", *there.on, *back.on]


def test_a_cpu_has_no_stream_for_copies() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.empty(64, 8)
    spec = {"devices": ["cpu:0"], "offload": ["*"]}
    plain, overlap = (
        estimated_plan(model, {**spec, "offload_overlap": given}, (x,)) for given in (False, True)
    )
    assert overlap.step_seconds == plain.step_seconds
    assert not overlap.stages[0].host_copy_nbytes
