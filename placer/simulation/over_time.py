"""Joins the bytes of a dry run with the seconds of the plan's step: the memory of each device over time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from placer.plan.step_spans import step_spans
from placer.plan.types import Plan
from placer.simulation.usage import DeviceTimeline
from placer.timeline import Task, end_of


class MemoryPoint(NamedTuple):
    """The bytes of all tensors on a device at a moment, in seconds from the beginning of the step."""

    seconds: float
    nbytes: int


Curve = tuple[MemoryPoint, ...]


def memory_over_time(plan: Plan, found: Sequence[DeviceTimeline]) -> tuple[Curve, ...]:
    """For each device of the dry run ``found``, its memory in a step; empty if times are not known.

    Two points for every task (an action, or the optimizer's step) in which the device allocates or frees: the
    most bytes in it, at its start, and the bytes that it leaves, at its end. Bytes and seconds are joined by
    the task. What is allocated between two tasks counts for the later one. A device's points are in the
    order in which the process allocates, which need not be that in which devices compute: a replica adds its
    gradients to those of the first one when that has ended. Such a task counts at the end of the one before.

    Of the dry run's steps this is the last, when the optimizer's state exists. Takes time linear in events.
    """
    spans = step_spans(plan)
    if not spans:
        return ((),) * len(found)
    times = {span.task: (span.start, span.end) for span in spans if span.task is not None}
    return tuple(_curve(run, times, end_of(spans)) for run in found)


def _curve(run: DeviceTimeline, times: Mapping[Task, tuple[float, float]], step: float) -> Curve:
    curve: list[MemoryPoint] = []
    done: set[Task] = set()
    seconds, live, most = 0.0, 0, 0
    for task, events in itertools.groupby(run.timeline.on(run.place), lambda event: event.task):
        before = live
        for event in events:
            block = run.timeline.blocks[event.block]
            if block.kind != "workspace":
                live += block.nbytes if event.kind == "allocate" else -block.nbytes
                most = max(most, live)
        if task is None:
            continue
        if task in done or not curve:  # a step does every task once, so this is the next step
            seconds, done, curve = 0.0, set(), [MemoryPoint(0.0, before)]
        done.add(task)
        # The plan's step may have fewer micro-batches than this one.
        start, end = (max(seconds, time) for time in times.get(task, (0.0, 0.0)))
        curve += [MemoryPoint(start, most), MemoryPoint(end, live)]
        seconds, most = end, live
    return (*curve, MemoryPoint(seconds, most), MemoryPoint(max(seconds, step), live))
