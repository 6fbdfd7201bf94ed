"""What a schedule implies: one order for one process, micro-batches in flight, idle time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from placer.schedule.types import Action, Schedule


def linearize(schedule: Schedule) -> tuple[Action, ...]:
    """One order of all actions that keeps every rank's own order and the data dependencies.

    The backwards of a micro-batch are done one after the other, earliest micro-batch first, and
    before each only what must come before it (a depth-first topological sort): gradients wait for
    as little as the ranks' orders allow. A forward that takes over what the stage before has made
    goes at once when it is the rank's turn, so that boundary values do not wait either.

    >>> from placer.schedule import make_schedule
    >>> print(*linearize(make_schedule("1F1B", 2, 2)))
    0F0 1F0 1B0 0F1 1F1 0B0 1B1 0B1
    """
    waiting = [list(reversed(actions)) for actions in schedule.actions]
    done: set[tuple[int, str, int]] = set()
    order: list[Action] = []

    def run_next(rank: int) -> None:
        action = waiting[rank][-1]
        for needed in _needs(action, schedule):
            run_until(needed)
        if _key(action) in done:  # it followed what it needed at once
            return
        waiting[rank].pop()
        done.add(_key(action))
        order.append(action)
        for near in (rank, (action.stage_index + 1) % len(waiting)):
            if waiting[near] and _takes_over(waiting[near][-1], done):
                run_next(near)

    def run_until(key: tuple[int, str, int]) -> None:
        rank = key[0] % len(waiting)
        while key not in done:
            assert waiting[rank], "the schedule waits for itself"
            run_next(rank)

    actions = [action for rank in schedule.actions for action in rank]
    for goal in sorted(actions, key=lambda a: (a.microbatch_index, -a.stage_index)):
        if goal.kind in "BI":
            run_until(_key(goal))
    for goal in actions:
        run_until(_key(goal))
    return tuple(order)


def _takes_over(action: Action, done: set[tuple[int, str, int]]) -> bool:
    before = action.stage_index - 1, "F", action.microbatch_index
    return action.kind == "F" and before in done


def merge_backward(schedule: Schedule) -> Schedule:
    """The schedule with split backwards done whole, where their first half stood."""
    actions = tuple(
        tuple(replace(a, kind="B") if a.kind == "I" else a for a in rank if a.kind != "W")
        for rank in schedule.actions
    )
    return replace(schedule, actions=actions)


def max_in_flight(schedule: Schedule, stage_index: int) -> int:
    """The most micro-batches whose forward ran on ``stage_index`` and whose backward has not ended.

    >>> from placer.schedule import make_schedule
    >>> [max_in_flight(make_schedule("1F1B", 4, 8), s) for s in range(4)]
    [4, 3, 2, 1]
    """
    alive = most = 0
    for action in schedule.actions[stage_index % len(schedule.actions)]:
        if action.stage_index == stage_index:
            alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, alive)
    return most


def bubble(schedule: Schedule) -> float:
    """Idle share of the ranks' time when a forward and each half of a backward take equally long.

    A rank starts an action when it and what the action waits for are done; GPipe and 1F1B with S
    stages and M micro-batches give (S - 1) / (M + S - 1).

    >>> from placer.schedule import make_schedule
    >>> bubble(make_schedule("GPipe", 4, 8)) == 3 / 11
    True
    """
    ends: dict[tuple[int, str, int], int] = {}
    clocks = [0] * len(schedule.actions)
    busy = 0
    for action in linearize(schedule):
        rank = action.stage_index % len(clocks)
        waits = [ends[key] for key in _needs(action, schedule)]
        seconds = 2 if action.kind == "B" else 1
        clocks[rank] = max([clocks[rank], *waits]) + seconds
        ends[_key(action)] = clocks[rank]
        busy += seconds
    return 1 - busy / (len(clocks) * max(clocks))


def draw(schedule: Schedule) -> str:
    """The table as text, a line per rank.

    >>> from placer.schedule import make_schedule
    >>> print(draw(make_schedule("GPipe", 2, 2)))
    rank 0  0F0 0F1 0B0 0B1
    rank 1  1F0 1F1 1B0 1B1
    """
    lines = [" ".join(map(str, actions)) for actions in schedule.actions]
    return "\n".join(f"rank {rank}  {line}" for rank, line in enumerate(lines))


def _needs(action: Action, schedule: Schedule) -> Iterator[tuple[int, str, int]]:
    """What must be done before ``action``: the neighbour's part, and the stage's own forward."""
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
    """I and B are the same to those who wait for the gradient of an input."""
    return action.stage_index, "B" if action.kind == "I" else action.kind, action.microbatch_index
