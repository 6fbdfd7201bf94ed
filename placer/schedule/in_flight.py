"""Counts the micro-batches whose activations or gradients a stage keeps while it runs another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from placer.schedule.order import linearize, merge_backward
from placer.schedule.types import Action, Schedule

Counts = tuple[tuple[float, ...], ...]
Moments = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The micro-batches in flight at one stage during a step, in the order of one process.

    A micro-batch is in flight from its forward to its backward. The unit is one micro-batch; the last one
    counts as ``last_share``, because it has fewer rows if the batch does not divide evenly.

    A moment is a pair: the number of others in flight while a micro-batch runs, and the share of that
    micro-batch. ``forwards`` are the moments before the stage's first backward, ``later_forwards`` those
    after it (GPipe has none). ``later_backwards`` come after the first backward, during which
    ``first_backward`` others are in flight. Only moments that no other moment exceeds are kept.

    ``pending_at_forwards`` and ``pending_at_backwards`` count gradients that the stage has computed for
    earlier stages and that those have not used yet. Each entry is a moment, with a number of micro-batches
    for every earlier stage.
    """

    microbatches: int = 1
    last_share: float = 1.0
    most: float = 1  # in flight at the same time, including the one that runs
    forwards: Moments = ((0, 1),)
    first_backward: float = 0
    later_forwards: Moments = ()
    later_backwards: Moments = ()
    pending_at_forwards: Counts = ()
    pending_at_backwards: Counts = ()


def in_flight_by_stage(schedule: Schedule, *, last_share: float = 1.0) -> tuple[InFlight, ...]:
    """The micro-batches in flight at each stage of ``schedule``; split backwards count as whole ones.

    >>> from placer.schedule import make_schedule
    >>> middle = in_flight_by_stage(make_schedule("1F1B", 3, 4))[1]
    >>> middle.most, middle.later_forwards, middle.pending_at_forwards
    (2.0, ((1.0, 1.0),), ((1.0,),))
    >>> [stage.most for stage in in_flight_by_stage(make_schedule("1F1B", 4, 8))]
    [4.0, 3.0, 2.0, 1.0]
    """
    order = linearize(merge_backward(schedule))
    stages = range(schedule.num_stages)
    return tuple(_in_flight(order, schedule, stage, last_share) for stage in stages)


def _in_flight(
    order: Sequence[Action], schedule: Schedule, stage_index: int, last_share: float
) -> InFlight:
    last = schedule.num_microbatches - 1
    # For each earlier stage, gradients it has not used
    unused = dict.fromkeys(range(stage_index), 0.0)
    running: dict[int, float] = {}  # the share of each micro-batch in flight
    forwards: list[set[tuple[float, ...]]] = [set(), set()]  # before the first backward, and after
    backwards: list[set[tuple[float, ...]]] = [set(), set()]
    pending: dict[str, set[tuple[float, ...]]] = {"F": set(), "B": set()}
    later = False
    for action in order:
        share = last_share if action.microbatch_index == last else 1.0
        if action.stage_index < stage_index and action.kind == "B":
            unused[action.stage_index] -= share
        if action.stage_index != stage_index:
            continue
        pending[action.kind].add(tuple(unused.values()))
        if action.kind == "F":
            forwards[later].add((sum(running.values()), share))
            running[action.microbatch_index] = share
        else:
            unused = {stage: count + share for stage, count in unused.items()}
            del running[action.microbatch_index]
            backwards[later].add((sum(running.values()), share))
            later = True
    return InFlight(
        microbatches=schedule.num_microbatches,
        last_share=last_share,
        most=max(others + share for others, share in (*forwards[0], *forwards[1])),
        forwards=_moments(forwards[0]),
        first_backward=max(others for others, _ in backwards[0]),
        later_forwards=_moments(forwards[1]),
        later_backwards=_moments(backwards[1]),
        pending_at_forwards=_largest(pending["F"]),
        pending_at_backwards=_largest(pending["B"]),
    )


def _moments(counts: Iterable[tuple[float, ...]]) -> Moments:
    return tuple((others, share) for others, share in _largest(counts))


def _largest(counts: Iterable[tuple[float, ...]]) -> Counts:
    """The Pareto front of ``counts``, without rows of zeros: no row is covered by another one."""
    found = sorted(set(counts))
    covers = lambda a, b: a != b and all(x >= y for x, y in zip(a, b, strict=True))  # noqa: E731
    return tuple(row for row in found if any(row) and not any(covers(o, row) for o in found))
