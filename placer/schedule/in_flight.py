"""What waits at one stage while a schedule runs: micro-batches in flight, gradients not yet taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from placer.schedule.order import linearize, merge_backward
from placer.schedule.types import Action, Schedule

Counts = tuple[tuple[float, ...], ...]
Moments = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Micro-batches at one stage over a step, in the order that one process runs it.

    ``most`` are in flight at once, the running one with them. The moments say how many others are
    when one runs, and how large that is: ``forwards`` before the stage's first backward,
    ``later_forwards`` after it (none under GPipe), and ``later_backwards`` after the first one, which
    has ``first_backward`` others. The last micro-batch counts as ``last_share`` of one: where the
    batch does not divide evenly it has fewer rows.

    ``untaken_at_forwards`` and ``untaken_at_backwards`` say of how many other micro-batches the
    stage still holds the gradients that an earlier stage has not taken: each entry a moment after
    the first backward, in it a number per earlier stage.
    """

    microbatches: int = 1
    last_share: float = 1.0
    most: float = 1
    forwards: Moments = ((0, 1),)
    first_backward: float = 0
    later_forwards: Moments = ()
    later_backwards: Moments = ()
    untaken_at_forwards: Counts = ()
    untaken_at_backwards: Counts = ()


def in_flight(schedule: Schedule, stage_index: int, *, last_share: float = 1.0) -> InFlight:
    """What waits at ``stage_index`` under ``schedule``; backwards are done whole.

    >>> from placer.schedule import make_schedule
    >>> waits = in_flight(make_schedule("1F1B", 3, 4), 1)
    >>> waits.most, waits.later_forwards, waits.untaken_at_forwards
    (2.0, ((1.0, 1.0),), ((1.0,),))
    >>> [in_flight(make_schedule("1F1B", 4, 8), stage).most for stage in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    """
    return _in_flight(linearize(merge_backward(schedule)), schedule, stage_index, last_share)


def in_flight_by_stage(schedule: Schedule, *, last_share: float = 1.0) -> tuple[InFlight, ...]:
    """`in_flight` for every stage; the schedule is put in order once for all of them."""
    order = linearize(merge_backward(schedule))
    stages = range(schedule.num_stages)
    return tuple(_in_flight(order, schedule, stage, last_share) for stage in stages)


def _in_flight(
    order: Sequence[Action], schedule: Schedule, stage_index: int, last_share: float
) -> InFlight:
    last = schedule.num_microbatches - 1
    waiting = dict.fromkeys(range(stage_index), 0.0)
    held: dict[int, float] = {}
    forwards: list[set[tuple[float, ...]]] = [set(), set()]  # before the first backward, and after
    backwards: list[set[tuple[float, ...]]] = [set(), set()]
    untaken: dict[str, set[tuple[float, ...]]] = {"F": set(), "B": set()}
    later = False
    for action in order:
        share = last_share if action.microbatch_index == last else 1.0
        if action.stage_index < stage_index and action.kind == "B":
            waiting[action.stage_index] -= share
        if action.stage_index != stage_index:
            continue
        untaken[action.kind].add(tuple(waiting.values()))
        if action.kind == "F":
            forwards[later].add((sum(held.values()), share))
            held[action.microbatch_index] = share
        else:
            waiting = {stage: count + share for stage, count in waiting.items()}
            del held[action.microbatch_index]
            backwards[later].add((sum(held.values()), share))
            later = True
    return InFlight(
        microbatches=schedule.num_microbatches,
        last_share=last_share,
        most=max(others + share for others, share in (*forwards[0], *forwards[1])),
        forwards=_moments(forwards[0]),
        first_backward=max(others for others, _ in backwards[0]),
        later_forwards=_moments(forwards[1]),
        later_backwards=_moments(backwards[1]),
        untaken_at_forwards=_largest(untaken["F"]),
        untaken_at_backwards=_largest(untaken["B"]),
    )


def _moments(counts: Iterable[tuple[float, ...]]) -> Moments:
    return tuple((others, share) for others, share in _largest(counts))


def _largest(counts: Iterable[tuple[float, ...]]) -> Counts:
    """Those that no other exceeds in every number; none if nothing waits."""
    found = sorted(set(counts))
    covers = lambda a, b: a != b and all(x >= y for x, y in zip(a, b, strict=True))  # noqa: E731
    return tuple(row for row in found if any(row) and not any(covers(o, row) for o in found))
