"""Finds the best stages along one order, by dynamic programming over the cuts at which stages may end.

Let f(q, b) be the least cost of the first q stages if they end at cut b. Then

    f(q, b) = min over a <= b of combine(f(q - 1, a), load(q, a, b))

where ``combine`` is the maximum (if stages work at the same time) or the sum. Takes O(k * C^2) time for k
stages and C cuts. The result is optimal for this order and these loads; of several optimal solutions, the
one with the earliest cuts is returned. This is the linear partition problem (Skiena, The Algorithm Design
Manual, section 10.7), with memory limits as in Tarnawski et al., "Efficient Algorithms for Device Placement
of DNN Graph Operators", NeurIPS 2020, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Mask = NDArray[np.bool_]
Made = TypeVar("Made")


def for_each(function: Callable[..., Made], *columns: Sequence[Any]) -> list[Made]:
    """``function`` of every row of ``columns``; equal rows (tables are compared by identity) have one result.

    Most stages of a chain are alike, and those that are have the same tables.

    >>> tables = for_each(np.full, [2, 3, 2], [1.0, 1.0, 1.0])
    >>> tables[0] is tables[2]
    True
    """
    known: dict[tuple[Any, ...], Made] = {}
    found = []
    for row in zip(*columns, strict=True):
        key = tuple(id(value) if isinstance(value, np.ndarray) else value for value in row)
        if key not in known:
            known[key] = function(*row)
        found.append(known[key])
    return found


def best_cuts(
    loads: Sequence[Table],
    feasible: Sequence[Mask],
    *,
    combine: Literal["max", "sum"],
    may_be_empty: Sequence[bool],
) -> tuple[tuple[int, ...], float] | None:
    """The cuts (indices) 0 = c_0 <= … <= c_k of least cost, and that cost; None if nothing is feasible.

    ``loads[q][x, y]`` is the load of stage q from cut x to cut y + 1, ``feasible[q][x, y]`` whether this
    is allowed, and ``may_be_empty[q]`` whether stage q may have no nodes.

    >>> works = np.array([1.0, 2.0, 3.0, 4.0])
    >>> load = np.array([[works[x:y + 1].sum() for y in range(4)] for x in range(4)])
    >>> best_cuts([load] * 2, [load > 0] * 2, combine="max", may_be_empty=[False] * 2)
    ((0, 3, 4), 6.0)
    """
    count = loads[0].shape[0]
    cost = np.full(count + 1, np.inf)
    cost[0] = 0.0
    columns = np.arange(count)
    join = np.maximum if combine == "max" else np.add
    choices: list[NDArray[np.int64]] = []
    for load, empty in zip(_allowed_loads(loads, feasible), may_be_empty, strict=True):
        reached = join(cost[:-1, None], load)
        start = np.argmin(reached, axis=0)
        choice = np.concatenate([[0], start])
        following = np.concatenate([[np.inf], reached[start, columns]])
        if empty:
            stay = cost <= following
            choice = np.where(stay, np.arange(count + 1), choice)
            following = np.where(stay, cost, following)
        choices.append(choice)
        cost = following
    if not np.isfinite(cost[count]):
        return None
    cuts = [count]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(cuts[::-1]), float(cost[count])


def boundary_costs(
    loads: Sequence[Table], feasible: Sequence[Mask], *, combine: Literal["max", "sum"]
) -> Table:
    """Entry ``[q, c]`` is the least cost if stage q ends at cut c and no stage is empty; O(k * C^2) time.

    It combines the cost of the first q + 1 stages up to c with the cost of the other stages from c on.
    """
    count = loads[0].shape[0]
    join = np.maximum if combine == "max" else np.add
    tables = _allowed_loads(loads, feasible)
    front, back = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
    front[0] = back[count] = 0.0
    before, after = [], []
    for table in tables[:-1]:
        front = np.concatenate([[np.inf], join(front[:-1, None], table).min(axis=0)])
        before.append(front)
    for table in tables[:0:-1]:
        back = np.concatenate([join(table, back[None, 1:]).min(axis=1), [np.inf]])
        after.append(back)
    return np.array([join(x, y) for x, y in zip(before, after[::-1], strict=True)])


def _allowed_loads(loads: Sequence[Table], feasible: Sequence[Mask]) -> list[Table]:
    """The loads, infinite where a stage would end before it begins or is not allowed."""
    forward = np.tri(loads[0].shape[0], dtype=bool).T
    return for_each(
        lambda load, allowed: np.where(allowed & forward, load, np.inf), loads, feasible
    )
