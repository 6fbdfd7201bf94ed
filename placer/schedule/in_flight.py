"""What waits at one stage while a schedule runs: micro-batches in flight, gradients not yet taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from placer.schedule.order import linearize, merge_backward
from placer.schedule.types import Schedule

Counts = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Micro-batches at one stage over a step, in the order that one process runs it.

    ``most`` whose activations are held at once, the running one with them; ``after_backward`` the
    same, counted from the moment on when the first backward has run. The others say of how many
    other micro-batches the stage still holds the gradients that an earlier stage has not taken:
    each entry a moment, in it a number per earlier stage. Moments are forwards after the first
    backward, and backwards. The last micro-batch counts as ``last_share`` of one: where the batch
    does not divide evenly it has fewer rows.
    """

    microbatches: int = 1
    last_share: float = 1.0
    most: float = 1
    after_backward: float = 1
    later_forwards: Counts = ()
    backwards: Counts = ()


def in_flight(schedule: Schedule, stage_index: int, *, last_share: float = 1.0) -> InFlight:
    """What waits at ``stage_index`` under ``schedule``; backwards are done whole.

    >>> from placer.schedule import make_schedule
    >>> waits = in_flight(make_schedule("1F1B", 3, 4), 1)
    >>> waits.most, waits.after_backward, waits.later_forwards
    (2.0, 2.0, ((1.0,),))
    >>> [in_flight(make_schedule("1F1B", 4, 8), stage).most for stage in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    """
    last = schedule.num_microbatches - 1
    waiting = dict.fromkeys(range(stage_index), 0.0)
    held: set[int] = set()
    most = after = 0.0
    seen_backward = False
    later: set[tuple[float, ...]] = set()
    backwards: set[tuple[float, ...]] = set()
    for action in linearize(merge_backward(schedule)):
        share = last_share if action.microbatch_index == last else 1.0
        if action.stage_index < stage_index and action.kind == "B":
            waiting[action.stage_index] -= share
        if action.stage_index != stage_index:
            continue
        moment = tuple(waiting.values())
        if action.kind == "F":
            held.add(action.microbatch_index)
            later.add(moment)
        else:
            backwards.add(moment)
            waiting = {stage: count + share for stage, count in waiting.items()}
        count = len(held) + (last_share - 1.0) * (last in held)
        most = max(most, count)
        if seen_backward:
            after = max(after, count)
        if action.kind == "B":
            held.remove(action.microbatch_index)
            seen_backward = True
    return InFlight(
        microbatches=schedule.num_microbatches,
        last_share=last_share,
        most=most,
        after_backward=max(after, 1.0),
        later_forwards=_largest(later),
        backwards=_largest(backwards),
    )


def _largest(counts: Iterable[tuple[float, ...]]) -> Counts:
    """Those that no other exceeds in every number; none if nothing waits."""
    found = sorted(set(counts))
    covers = lambda a, b: a != b and all(x >= y for x, y in zip(a, b, strict=True))  # noqa: E731
    return tuple(row for row in found if any(row) and not any(covers(o, row) for o in found))
