"""Better borders for large graphs: units near the heaviest stage's borders are placed again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from placer.partition.problem import (
    CrossingValue,
    PartitionProblem,
    StageSlot,
    Vector,
    stage_loads,
)

Indices = NDArray[np.int64]
SolveSmall = Callable[[PartitionProblem], Indices | None]

_WINDOW = 96  # units on either side of a border
_MOST_ROUNDS = 200
_BEFORE, _LEFT, _RIGHT, _AFTER = range(4)


def refine_borders(
    problem: PartitionProblem, order: Indices, stage_of: Indices, solve_small: SolveSmall
) -> Indices:
    """``stage_of`` with units near borders moved across them, while the largest load shrinks.

    The borders of the heaviest stage are improved one after the other: the 96 units of the order on
    each side are placed on the two stages anew by ``solve_small``, all others staying. A border that
    could not be improved is left alone until a neighbour changes. At most 200 rounds.
    """
    stage_of = stage_of.copy()
    near = _Neighbours(problem)
    loads = stage_loads(problem, stage_of)
    place = np.empty(problem.num_units, dtype=np.int64)
    place[order] = np.arange(problem.num_units)
    settled: set[int] = set()
    for _ in range(_MOST_ROUNDS):
        heaviest = int(np.argmax(loads))
        borders = [b for b in (heaviest - 1, heaviest) if 0 <= b < len(loads) - 1]
        borders = [b for b in borders if b not in settled]
        if not borders:
            break
        border = borders[0]
        settled.add(border)
        if _improve(problem, near, place, stage_of, loads, border, solve_small):
            settled -= {border - 1, border, border + 1}
    return stage_of


class _Neighbours:
    """Values and edges by unit."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.values: list[list[int]] = [[] for _ in range(problem.num_units)]
        for v, value in enumerate(problem.values):
            for u in value.units:
                self.values[u].append(v)
        self.succs: list[list[int]] = [[] for _ in range(problem.num_units)]
        self.preds: list[list[int]] = [[] for _ in range(problem.num_units)]
        for a, b in problem.edges:
            self.succs[a].append(b)
            self.preds[b].append(a)


def _improve(
    problem: PartitionProblem,
    near: _Neighbours,
    place: Indices,
    stage_of: Indices,
    loads: Vector,
    border: int,
    solve_small: SolveSmall,
) -> bool:
    """Place the units around ``border`` again, in place; whether the larger load of the two shrank."""
    left = np.flatnonzero(stage_of == border)
    right = np.flatnonzero(stage_of == border + 1)
    left, right = left[np.argsort(place[left])], right[np.argsort(place[right])]
    window = np.concatenate([left[-_WINDOW:], right[:_WINDOW]])
    free = len(window) < len(left) + len(right)
    if not free or not len(window):
        return False
    number = {int(u): i + 4 for i, u in enumerate(window)}

    def part(unit: int) -> int:
        if unit in number:
            return number[unit]
        stage = stage_of[unit]
        if stage < border:
            return _BEFORE
        return _AFTER if stage > border + 1 else _LEFT if stage == border else _RIGHT

    values = []
    touched = sorted({v for u in window.tolist() for v in near.values[u]})
    for v in touched:
        value = problem.values[v]
        units = tuple(sorted({part(u) for u in value.units}))
        values.append(CrossingValue(nbytes=value.nbytes, units=units, external=value.external))
    edges = {(_BEFORE, _LEFT), (_LEFT, _RIGHT), (_RIGHT, _AFTER)}
    for u in window.tolist():
        edges |= {(_LEFT, number[u]), (number[u], _RIGHT)}  # on one of these two stages
        edges |= {(number[u], part(w)) for w in near.succs[u]}
        edges |= {(part(w), number[u]) for w in near.preds[u]}
    slots = [
        StageSlot(
            device=f"{i}",
            seconds=np.zeros(len(window) + 4),
            seconds_per_byte=0.0,
            nbytes=np.zeros(len(window) + 4),
        )
        for i in range(4)
    ]
    for i, stage in ((_LEFT, border), (_RIGHT, border + 1)):
        slot = problem.slots[stage]
        seconds = np.concatenate([np.zeros(4), slot.seconds[window]])
        nbytes = np.concatenate([np.zeros(4), slot.nbytes[window]])
        own = stage_of[window] == stage
        nbytes[i] = slot.nbytes[stage_of == stage].sum() - nbytes[4:][own].sum()
        slots[i] = StageSlot(
            device=f"{i}",
            seconds=seconds,
            seconds_per_byte=slot.seconds_per_byte,
            nbytes=nbytes,
            budget=slot.budget,
        )
    pins = {i: f"{i}" for i in range(4)}
    names = {problem.slots[border].device: "1", problem.slots[border + 1].device: "2"}
    pins |= {number[u]: names[problem.pins[u]] for u in number if u in problem.pins}
    small = PartitionProblem(
        num_units=len(window) + 4,
        edges=tuple(sorted(edges)),
        values=tuple(values),
        slots=tuple(slots),
        pins=pins,
        relayed=problem.relayed,
        may_be_empty=True,
    )
    now = np.concatenate([np.arange(4), np.where(stage_of[window] == border, _LEFT, _RIGHT)])
    here = stage_loads(small, now)
    # What the rest of both stages costs in any case: loads less what the window decides.
    for i, stage in ((_LEFT, border), (_RIGHT, border + 1)):
        slots[i].seconds[i] = max(0.0, loads[stage] - here[i])
    found = solve_small(small)
    if found is None:
        return False
    reached = stage_loads(small, found)
    worst = loads[[border, border + 1]].max()
    if reached.max() >= worst * (1 - 1e-6):
        return False
    stage_of[window] = np.where(found[4:] == _LEFT, border, border + 1)
    loads[[border, border + 1]] = reached[[_LEFT, _RIGHT]]
    return True
