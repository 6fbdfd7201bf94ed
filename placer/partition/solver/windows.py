"""Better boundaries for large graphs: units near the heaviest stage's boundaries are placed again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.problem import (
    PartitionProblem,
    SharedValue,
    StageSlot,
    Vector,
    stage_loads,
)

Indices = NDArray[np.int64]
SolveSmall = Callable[[PartitionProblem], Indices | None]

_WINDOW = 96  # units on either side of a boundary
_MOST_ROUNDS = 200
_BEFORE, _LEFT, _RIGHT, _AFTER = range(4)  # stages of a window, and the units that stay on each
_OUTSIDE = 4  # of these


def refine_boundaries(
    problem: PartitionProblem, order: Indices, stage_of: Indices, solve_small: SolveSmall
) -> Indices:
    """``stage_of`` with units near boundaries moved across them, while the largest load shrinks.

    The boundaries of the heaviest stage are improved one after the other: the 96 units of the order on
    each side are placed on the two stages anew by ``solve_small``, all others staying. A boundary that
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
        boundaries = [b for b in (heaviest - 1, heaviest) if 0 <= b < len(loads) - 1]
        boundaries = [b for b in boundaries if b not in settled]
        if not boundaries:
            break
        boundary = boundaries[0]
        settled.add(boundary)
        if _improve(problem, near, place, stage_of, loads, boundary, solve_small):
            settled -= {boundary - 1, boundary, boundary + 1}
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
    boundary: int,
    solve_small: SolveSmall,
) -> bool:
    """Place the units around ``boundary`` again, in place; whether the larger load of the two shrank."""
    units = _units_around(place, stage_of, boundary)
    if units is None:
        return False
    small = _window_problem(problem, near, stage_of, units, boundary)
    here = stage_loads(small, _with_outside(np.where(stage_of[units] == boundary, _LEFT, _RIGHT)))
    # What the rest of both stages costs in any case: loads less what the window decides.
    for i, stage in ((_LEFT, boundary), (_RIGHT, boundary + 1)):
        small.slots[i].seconds[i] = max(0.0, loads[stage] - here[i])
    found = solve_small(small)
    if found is None:
        return False
    reached = stage_loads(small, found)
    worst = loads[[boundary, boundary + 1]].max()
    if reached.max() >= worst * (1 - 1e-6):
        return False
    stage_of[units] = np.where(found[_OUTSIDE:] == _LEFT, boundary, boundary + 1)
    loads[[boundary, boundary + 1]] = reached[[_LEFT, _RIGHT]]
    return True


def _units_around(place: Indices, stage_of: Indices, boundary: int) -> Indices | None:
    """The last units of the stage before ``boundary``, and the first after it; None: that is all of both."""
    left = np.flatnonzero(stage_of == boundary)
    right = np.flatnonzero(stage_of == boundary + 1)
    left, right = left[np.argsort(place[left])], right[np.argsort(place[right])]
    units = np.concatenate([left[-_WINDOW:], right[:_WINDOW]])
    return units if 0 < len(units) < len(left) + len(right) else None


def _window_problem(
    problem: PartitionProblem, near: _Neighbours, stage_of: Indices, units: Indices, boundary: int
) -> PartitionProblem:
    """Where to put ``units`` on the boundary's two stages, as a problem of its own.

    It has four stages, and all that stays is joined into a unit on each: 0 for the stages before
    these two, 1 and 2 for the two themselves, 3 for those after. ``units`` are 4, 5, … in order.
    """
    number = {int(u): i for i, u in enumerate(units, _OUTSIDE)}

    def part(unit: int) -> int:
        if unit in number:
            return number[unit]
        stage = stage_of[unit]
        if stage < boundary:
            return _BEFORE
        return _AFTER if stage > boundary + 1 else _LEFT if stage == boundary else _RIGHT

    values = []
    for v in sorted({v for u in number for v in near.values[u]}):
        value = problem.values[v]
        joined = tuple(sorted({part(u) for u in value.units}))
        values.append(SharedValue(nbytes=value.nbytes, units=joined, external=value.external))
    edges = {(_BEFORE, _LEFT), (_LEFT, _RIGHT), (_RIGHT, _AFTER)}
    for u, own in number.items():
        edges |= {(_LEFT, own), (own, _RIGHT)}  # on one of these two stages
        edges |= {(own, part(w)) for w in near.succs[u]}
        edges |= {(part(w), own) for w in near.preds[u]}
    names = {problem.slots[boundary].device: "1", problem.slots[boundary + 1].device: "2"}
    pins = {i: f"{i}" for i in range(_OUTSIDE)}
    pins |= {own: names[problem.pins[u]] for u, own in number.items() if u in problem.pins}
    return PartitionProblem(
        num_units=len(units) + _OUTSIDE,
        edges=tuple(sorted(edges)),
        values=tuple(values),
        slots=_window_slots(problem, stage_of, units, boundary),
        pins=pins,
        may_be_empty=True,
    )


def _window_slots(
    problem: PartitionProblem, stage_of: Indices, units: Indices, boundary: int
) -> tuple[StageSlot, ...]:
    """The boundary's two stages, with the bytes of what stays on them, between two that are free."""
    free = np.zeros(len(units) + _OUTSIDE)
    slots = [
        StageSlot(device=f"{i}", seconds=free.copy(), seconds_per_byte=0.0, nbytes=free.copy())
        for i in range(_OUTSIDE)
    ]
    for i, stage in ((_LEFT, boundary), (_RIGHT, boundary + 1)):
        slot = problem.slots[stage]
        nbytes = np.concatenate([np.zeros(_OUTSIDE), slot.nbytes[units]])
        moving = slot.nbytes[units][stage_of[units] == stage].sum()
        nbytes[i] = slot.nbytes[stage_of == stage].sum() - moving
        slots[i] = StageSlot(
            device=f"{i}",
            seconds=np.concatenate([np.zeros(_OUTSIDE), slot.seconds[units]]),
            seconds_per_byte=slot.seconds_per_byte,
            nbytes=nbytes,
            budget=slot.budget,
        )
    return tuple(slots)


def _with_outside(stage_of_units: Indices) -> Indices:
    """The stages of all units of a window's problem, from those of its own."""
    return np.concatenate([np.arange(_OUTSIDE), stage_of_units])
