"""Puts the actions of all ranks of a schedule into one order, as a single process would run them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from placer.schedule.types import Action, Schedule


def linearize(schedule: Schedule) -> tuple[Action, ...]:
    """One order of all actions that keeps the order of every rank and the data dependencies.

    If several actions can run, forwards of all stages but the first come first; then the earliest
    micro-batch, and its backward before its forward. So values are not kept longer than necessary.
    Takes O(actions * log(ranks)) time.

    >>> from placer.schedule import make_schedule
    >>> print(*linearize(make_schedule("1F1B", 2, 2)))
    0F0 1F0 1B0 0F1 1F1 0B0 1B1 0B1
    """
    ranks = len(schedule.actions)
    upcoming = [0] * ranks  # for each rank, the index of its next action
    queued = [False] * ranks  # whether that action is in ``ready`` already
    ready: list[tuple[tuple[bool, int, bool, int], int]] = []  # urgency, rank; a heap
    done: set[tuple[int, str, int]] = set()
    order: list[Action] = []

    def queue_if_ready(rank: int) -> None:
        if queued[rank] or upcoming[rank] == len(schedule.actions[rank]):
            return
        action = schedule.actions[rank][upcoming[rank]]
        if done.issuperset(_needs(action, schedule)):
            heapq.heappush(ready, (_urgency(action), rank))
            queued[rank] = True

    for rank in range(ranks):
        queue_if_ready(rank)
    while ready:
        _, rank = heapq.heappop(ready)
        action = schedule.actions[rank][upcoming[rank]]
        upcoming[rank] += 1
        queued[rank] = False
        done.add(_key(action))
        order.append(action)
        # Only this rank and the ranks of neighbouring stages can have an action that waited for this one.
        at = action.stage_index
        for neighbour in schedule.rank_of[max(0, at - 1) : at + 2]:
            queue_if_ready(neighbour)
    assert len(order) == sum(map(len, schedule.actions)), "the schedule has a deadlock"
    return tuple(order)


def _urgency(action: Action) -> tuple[bool, int, bool, int]:
    is_later_stage = action.kind == "F" and action.stage_index > 0
    return not is_later_stage, action.microbatch_index, action.kind == "F", -action.stage_index


def merge_backward(schedule: Schedule) -> Schedule:
    """The schedule with every split backward replaced by a whole one (B) in place of its first half (I)."""
    actions = tuple(
        tuple(replace(a, kind="B") if a.kind == "I" else a for a in rank if a.kind != "W")
        for rank in schedule.actions
    )
    return replace(schedule, actions=actions)


def _needs(action: Action, schedule: Schedule) -> Iterator[tuple[int, str, int]]:
    """Keys of the actions that ``action`` depends on, in its own and in a neighbouring stage."""
    stage, microbatch = action.stage_index, action.microbatch_index
    if action.kind == "F":
        if stage > 0:
            yield stage - 1, "F", microbatch
    elif action.kind == "W":
        yield stage, "B", microbatch
    else:
        yield stage, "F", microbatch
        if stage < schedule.num_stages - 1:
            yield stage + 1, "B", microbatch


def _key(action: Action) -> tuple[int, str, int]:
    """A key of the action. I and B share one, because both compute the gradients of the stage's inputs."""
    return action.stage_index, "B" if action.kind == "I" else action.kind, action.microbatch_index
