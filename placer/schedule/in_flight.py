"""Counts the micro-batches whose activations or gradients a stage keeps while it runs another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from placer.schedule.order import linearize
from placer.schedule.types import Action, Schedule

Counts = tuple[tuple[float, ...], ...]
Moments = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """The micro-batches in flight at one stage during a step, in the order of one process.

    A micro-batch is in flight from its forward to its backward, or to the half for weights of a split one,
    which needs all that forward kept. The unit is one micro-batch; the last one
    counts as ``last_share``, because it has fewer rows if the batch does not divide evenly.

    A moment is a pair: the number of others in flight while a micro-batch runs, and the share of that
    micro-batch. ``forwards`` are the moments before the stage's first backward, ``later_forwards`` those
    after it (GPipe has none). ``later_backwards`` come after the first backward, during which
    ``first_backward`` others are in flight. Only moments that no other moment exceeds are kept.

    ``pending_at_forwards`` and ``pending_at_backwards`` count gradients that the stage has computed for
    earlier stages and that those have not used yet. Each entry is a moment, with a number of micro-batches
    for every earlier stage. ``waiting`` is the most micro-batches at a time between the two halves of a
    split backward: the gradients that arrived at their weights wait, too.
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
    waiting: float = 0


def in_flight_by_stage(schedule: Schedule, *, last_share: float = 1.0) -> tuple[InFlight, ...]:
    """The micro-batches in flight at each stage of ``schedule``.

    >>> from placer.schedule import make_schedule
    >>> middle = in_flight_by_stage(make_schedule("1F1B", 3, 4))[1]
    >>> middle.most, middle.later_forwards, middle.pending_at_forwards
    (2.0, ((1.0, 1.0),), ((1.0,),))
    >>> [stage.most for stage in in_flight_by_stage(make_schedule("1F1B", 4, 8))]
    [4.0, 3.0, 2.0, 1.0]
    >>> split = in_flight_by_stage(make_schedule("InterleavedZeroBubble", 4, 8))
    >>> [(stage.most, stage.waiting) for stage in split]
    [(4.0, 1.0), (4.0, 2.0), (4.0, 3.0), (4.0, 4.0)]
    """
    last = schedule.num_microbatches - 1
    stages = [_Stage() for _ in range(schedule.num_stages)]
    backwards = np.zeros(schedule.num_stages)  # of each stage, so far
    for action in linearize(schedule):
        index = action.stage_index
        share = last_share if action.microbatch_index == last else 1.0
        if action.kind != "W":
            # For each earlier stage, gradients that it has not used
            unused = tuple((backwards[index] - backwards[:index]).tolist())
            stages[index].pending["F" if action.kind == "F" else "B"].add(unused)
        stages[index].do(action, share)
        backwards[index] += share * (action.kind in "BI")
    return tuple(
        stage.in_flight(schedule.num_microbatches, last_share=last_share) for stage in stages
    )


class _Stage:
    """Records the moments of one stage."""

    def __init__(self) -> None:
        self.pending: dict[str, set[tuple[float, ...]]] = {"F": set(), "B": set()}
        # Before the first backward, and after
        self._forwards: list[set[tuple[float, ...]]] = [set(), set()]
        self._backwards: list[set[tuple[float, ...]]] = [set(), set()]
        self._running: dict[int, float] = {}  # the share of each micro-batch in flight
        self._halfway: dict[int, float] = {}  # of those between the halves of their backward
        self._waiting = 0.0
        self._later = False

    def do(self, action: Action, share: float) -> None:
        """Count ``action``, of this stage."""
        if action.kind == "F":
            self._forwards[self._later].add((sum(self._running.values()), share))
            self._running[action.microbatch_index] = share
        elif action.kind == "W":
            del self._running[action.microbatch_index], self._halfway[action.microbatch_index]
        else:
            del self._running[action.microbatch_index]
            self._backwards[self._later].add((sum(self._running.values()), share))
            self._later = True
            if action.kind == "I":
                self._running[action.microbatch_index] = share
                self._halfway[action.microbatch_index] = share
                self._waiting = max(self._waiting, sum(self._halfway.values()))

    def in_flight(self, microbatches: int, *, last_share: float) -> InFlight:
        """What was in flight in all actions."""
        return InFlight(
            microbatches=microbatches,
            last_share=last_share,
            most=max(others + share for part in self._forwards for others, share in part),
            forwards=_moments(self._forwards[0]),
            first_backward=max(others for others, _ in self._backwards[0]),
            later_forwards=_moments(self._forwards[1]),
            later_backwards=_moments(self._backwards[1]),
            pending_at_forwards=_largest(self.pending["F"]),
            pending_at_backwards=_largest(self.pending["B"]),
            waiting=self._waiting,
        )


def _moments(counts: Iterable[tuple[float, ...]]) -> Moments:
    return tuple((others, share) for others, share in _largest(counts))


def _largest(counts: Iterable[tuple[float, ...]]) -> Counts:
    """The Pareto front of ``counts``, without rows of zeros: no row is covered by another one."""
    found = sorted(row for row in set(counts) if any(row))
    rows = np.array(found)
    return tuple(
        row
        for number, row in enumerate(found)
        if np.count_nonzero((rows >= rows[number]).all(axis=1)) == 1  # only by itself
    )
