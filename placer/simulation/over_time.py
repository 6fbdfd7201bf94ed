"""Joins the bytes of a dry run with the seconds of the plan's step: the memory of each device over time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from placer.plan.step_spans import step_spans
from placer.plan.types import Plan
from placer.simulation.usage import DeviceTimeline
from placer.timeline import MEMORY_KINDS, Block, Event, StepPosition, Task, end_of, memory_kind

_INTERVALS = 240  # of a step; more than a screen can tell apart
_LAYERS = 8  # of a point


class LayerBytes(NamedTuple):
    """The bytes of a layer's tensors of one kind; the layer is "" outside of the model's layers."""

    layer: str
    kind: str
    nbytes: int


class MemoryPoint(NamedTuple):
    """The tensors on a device from a moment on, until the next point.

    ``seconds`` are from the beginning of the step; where times are not known, every task counts as one
    second. ``kinds`` has bytes by kind, ``layers`` the largest part of them, and ``where`` is what was
    running last.
    """

    seconds: float
    kinds: Mapping[str, int]
    layers: tuple[LayerBytes, ...]
    where: StepPosition

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.kinds.values())


Curve = tuple[MemoryPoint, ...]


def memory_over_time(plan: Plan, found: Sequence[DeviceTimeline]) -> tuple[Curve, ...]:
    """For each device of the dry run ``found``, its memory in a step.

    Bytes and seconds are joined by the task (an action, or the optimizer's step); the events of a task are
    spread evenly over it, and those between two tasks are at the end of the earlier one. A device's events
    are in the order in which the process allocates, which need not be that in which devices compute: another
    replica adds its gradients to those of the first one when that has ended. Such a task counts at the end
    of the one before. Of each small interval of the step there is the point with the most bytes, so that the
    maximum is the peak.

    Of the dry run's steps this is the last, when the optimizer's state exists. Takes time linear in events.
    """
    spans = step_spans(plan)
    times = {span.task: (span.start, span.end) for span in spans if span.task is not None}
    return tuple(_curve(run, times, end_of(spans)) for run in found)


def _curve(run: DeviceTimeline, times: Mapping[Task, tuple[float, float]], step: float) -> Curve:
    blocks = run.timeline.blocks
    events = [e for e in run.timeline.on(run.place) if blocks[e.block].kind != "workspace"]
    first = _last_step(events)
    moments = list(_moments(events[first:], times))
    last = moments[-1] if moments else 0.0
    end = max(step, last) if times else math.floor(last) + 1.0
    totals = list(itertools.accumulate(_change(event, blocks) for event in events))
    # Interval -> number of the event after which there are the most bytes
    highest: dict[int, int] = {}
    for number, at in enumerate(moments, start=first):
        interval = int(at / end * _INTERVALS) if end else 0
        if interval not in highest or totals[number] > totals[highest[interval]]:
            highest[interval] = number
    shown = set(highest.values())
    kinds: Counter[str] = Counter()
    layers: Counter[tuple[str, str]] = Counter()
    where = StepPosition()

    def point(at: float) -> MemoryPoint:
        largest = heapq.nlargest(_LAYERS, ((n, *key) for key, n in layers.items() if n))
        return MemoryPoint(
            at,
            {kind: kinds[kind] for kind in MEMORY_KINDS},
            tuple(LayerBytes(layer, kind, nbytes) for nbytes, layer, kind in largest),
            where,
        )

    curve: list[MemoryPoint] = []
    for number, event in enumerate(events):
        if number == first:
            curve.append(point(0.0))
        block = blocks[event.block]
        kind = memory_kind(block.kind)
        kinds[kind] += _change(event, blocks)
        layers[block.layer, kind] += _change(event, blocks)
        if event.kind == "allocate" and block.where.phase:
            where = block.where
        if number in shown:
            curve.append(point(moments[number - first]))
    return (*curve, point(end))


def _change(event: Event, blocks: Sequence[Block]) -> int:
    nbytes = blocks[event.block].nbytes
    return nbytes if event.kind == "allocate" else -nbytes


def _last_step(events: Sequence[Event]) -> int:
    """The number of the first event of the last step: a step does every task once."""
    first, done, before = 0, set[Task](), None
    for number, event in enumerate(events):
        if event.task is None or event.task == before:
            continue
        if event.task in done:
            first, done = number, set()
        done.add(event.task)
        before = event.task
    return first


def _moments(events: Sequence[Event], times: Mapping[Task, tuple[float, float]]) -> Iterator[float]:
    """When each event is; see `MemoryPoint`."""
    now = 0.0
    for task, group in itertools.groupby(events, key=lambda event: event.task):
        # The plan's step may have fewer micro-batches than this one.
        start, end = times.get(task, (now, now)) if task is not None else (now, now)
        if task is not None and not times:
            end = now + 1
        start = max(now, start)
        now = max(start, end)
        count = len(list(group))
        yield from (start + (now - start) * number / count for number in range(count))
