"""What waits at one stage while a schedule runs: micro-batches in flight, gradients not yet taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from placer.schedule.order import linearize, max_in_flight, merge_backward
from placer.schedule.types import Schedule

Counts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Micro-batches at one stage over a step, in the order that one process runs it.

    ``most`` whose activations are held at once; ``after_backward`` the same, counted from the moment
    on when the first backward has run. The others say of how many other micro-batches the stage
    still holds the gradients that an earlier stage has not taken: each entry a moment, in it a
    number per earlier stage. Moments are forwards after the first backward, and backwards.
    """

    microbatches: int = 1
    most: int = 1
    after_backward: int = 1
    later_forwards: Counts = ()
    backwards: Counts = ()


def in_flight(schedule: Schedule, stage_index: int) -> InFlight:
    """What waits at ``stage_index`` under ``schedule``; backwards are done whole.

    >>> from placer.schedule import make_schedule
    >>> waits = in_flight(make_schedule("1F1B", 3, 4), 1)
    >>> waits.most, waits.after_backward, waits.later_forwards
    (2, 2, ((1,),))
    """
    waiting = dict.fromkeys(range(stage_index), 0)
    held = after = microbatches = 0
    seen_backward = False
    later: set[tuple[int, ...]] = set()
    backwards: set[tuple[int, ...]] = set()
    for action in linearize(merge_backward(schedule)):
        if action.stage_index < stage_index:
            waiting[action.stage_index] -= action.kind == "B"
        if action.stage_index != stage_index:
            continue
        moment = tuple(waiting.values())
        if action.kind == "F":
            held += 1
            microbatches += 1
            later.add(moment)
        else:
            backwards.add(moment)
            waiting = {stage: count + 1 for stage, count in waiting.items()}
        if seen_backward:
            after = max(after, held)
        if action.kind == "B":
            held -= 1
            seen_backward = True
    return InFlight(
        microbatches=microbatches,
        most=max_in_flight(schedule, stage_index),
        after_backward=max(after, 1),
        later_forwards=_largest(later),
        backwards=_largest(backwards),
    )


def _largest(counts: Iterable[tuple[int, ...]]) -> Counts:
    """Those that no other exceeds in every number; none if nothing waits."""
    found = sorted(set(counts))
    covers = lambda a, b: a != b and all(x >= y for x, y in zip(a, b, strict=True))  # noqa: E731
    return tuple(row for row in found if any(row) and not any(covers(o, row) for o in found))
