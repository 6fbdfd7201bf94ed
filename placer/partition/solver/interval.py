"""Solves large problems, whose downsets are too many to enumerate: stages are intervals of one order.

About 1,500 cuts are chosen first. Then the dynamic program of `placer.partition.chain` runs over the
intervals whose loads are below the best so far. An interval pays for a value if it has some, but not all, of
its units; these bytes are computed for all intervals at once (`placer.partition.rectangles`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placer.partition.rectangles import Rectangles
from placer.partition.solver.problem import PartitionProblem, Vector

Indices = NDArray[np.int64]

_MOST_CUTS = 1500
_TOLERANCE = 1e-12


def best_intervals(problem: PartitionProblem, order: Indices, bound: float) -> Indices | None:
    """The stage of every unit, with intervals of ``order`` as stages; None if no load is below ``bound``.

    Respects budgets and pins, and is optimal for the chosen cuts. O(uses + C^2 + k * C * D) for k stages
    and C cuts, of which D are in the largest stage.
    """
    place = np.empty(problem.num_units, dtype=np.int64)
    place[order] = np.arange(problem.num_units)
    cuts = _choose_cuts(problem, order, place)
    count = len(cuts)
    crossing = np.zeros((count, count))
    if any(slot.seconds_per_byte for slot in problem.slots):
        crossing = _crossing_bytes(problem, cuts, place)
    value = np.full(count, np.inf)
    value[0] = 0.0
    choices = []
    for slot in problem.slots:
        seconds = _sums(slot.seconds[order], cuts)
        nbytes = _sums(slot.nbytes[order], cuts)
        foreign = np.zeros(problem.num_units)
        for unit, device in problem.pins.items():
            foreign[unit] = device != slot.device
        foreign = _sums(foreign[order], cuts)
        budget = np.inf if slot.budget is None else slot.budget * (1 + _TOLERANCE)
        following = np.full(count, np.inf)
        choice = np.arange(count)
        for width in range(1, count):
            load = seconds[width:] - seconds[:-width]
            if load.min() >= bound:
                break
            load = load + slot.seconds_per_byte * crossing.diagonal(width)
            load = np.maximum(load, value[:-width])
            load[nbytes[width:] - nbytes[:-width] > budget] = np.inf
            load[foreign[width:] - foreign[:-width] > 0.5] = np.inf
            (better,) = ((load < following[width:]) & (load < bound)).nonzero()
            if better.size:
                following[width + better] = load[better]
                choice[width + better] = better
        value = following
        choices.append(choice)
    if not value[-1] < bound:
        return None
    stage_of = np.empty(problem.num_units, dtype=np.int64)
    at = count - 1
    for q in reversed(range(len(problem.slots))):
        start = int(choices[q][at])
        stage_of[order[cuts[start] : cuts[at]]] = q
        at = start
    return stage_of


def _sums(weights: Vector, cuts: Indices) -> Vector:
    return np.concatenate([[0.0], np.cumsum(weights)])[cuts]


def _choose_cuts(problem: PartitionProblem, order: Indices, place: Indices) -> Indices:
    """The positions of cuts: the cheapest in every stretch with an equal share of work and units."""
    n = problem.num_units
    auxiliary = np.zeros(n)
    auxiliary[sorted(problem.auxiliary)] = 1.0
    standalone = np.concatenate([[0], np.cumsum(1 - auxiliary[order])])
    possible = np.flatnonzero((standalone[1:-1] > 0) & (standalone[1:-1] < standalone[-1])) + 1
    most = max(_MOST_CUTS, 4 * len(problem.slots))
    if len(possible) > most:
        changes, position = [0.0] * (n + 1), place.tolist()
        for value in problem.values:
            if not value.external:
                at = [position[unit] for unit in value.units]
                changes[min(at) + 1] += value.nbytes
                changes[max(at) + 1] -= value.nbytes
        crossing = np.cumsum(changes)
        work = np.cumsum(problem.slots[0].seconds[order])
        share = np.arange(1, n + 1) / n + (work / work[-1] if work[-1] else 0.0)
        stretch = np.minimum((share * (most / 2)).astype(np.int64), most - 1)[possible - 1]
        by_cost = np.lexsort((possible, crossing[possible], stretch))
        first = np.concatenate([[True], np.diff(stretch[by_cost]) > 0])
        possible = np.sort(possible[by_cost[first]])
    return np.concatenate([[0], possible, [n]]).astype(np.int64)


def _crossing_bytes(problem: PartitionProblem, cuts: Indices, place: Indices) -> Vector:
    """``[x, y]``: the bytes of values that cross the boundaries of the stage from cut x to cut y."""
    count, found = len(cuts), Rectangles()
    interval_of = (np.searchsorted(cuts, place, side="right") - 1).tolist()
    for value in problem.values:
        own = sorted({interval_of[unit] for unit in value.units})
        # In an interval: the stage from cut x to cut y has those from x to y - 1
        found.add_if_any_inside(own, value.nbytes)
        if not value.external:
            found.add(0, own[0], own[-1], -value.nbytes)
    steps = found.steps(np.arange(count + 1), np.arange(count + 1))
    inside: Vector = np.cumsum(np.cumsum(steps, axis=0), axis=1)[:count, : count - 1]
    return np.concatenate([np.zeros((count, 1)), inside], axis=1)
