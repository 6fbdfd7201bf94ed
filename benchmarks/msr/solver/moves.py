"""Placements under tight budgets: units move between stages one by one, over worse placements too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.problem import PartitionProblem, Vector, stage_loads

Indices = NDArray[np.int64]

_MOST_MOVES = 150  # of one pass; a unit moves once in a pass
_MOST_PASSES = 4
_NEARER = 0.999  # of the best load: where to from the second pass on
_TOLERANCE = 1e-10


def move_units(problem: PartitionProblem, stage_of: Indices, target: float) -> Indices | None:
    """A placement within the budgets, by moves of single units from ``stage_of``; None if none met.

    After Fiduccia and Mattheyses (DAC 1982): each move takes a unit off the stage that is the most
    above its budget (or ``target``, the load to reach) to a stage that its edges allow, where the
    sum of squared excesses is then the least, better than before or not; a unit moves once in a
    pass, and the best placement of a pass begins the next. Heuristic, deterministic.
    O(passes * moves * stages * uses of the units of a stage). Pins hold.
    """
    search = _Moves(problem, stage_of, target)
    best, best_value = None, np.inf
    for _ in range(_MOST_PASSES):
        before = best_value
        search.begin_pass()
        for _ in range(_MOST_MOVES):
            value = search.value()
            if value < best_value * (1 - _TOLERANCE):
                best, best_value = search.stage_of.copy(), value
            if best_value <= target * (1 + _TOLERANCE) or not search.move():
                break
        if best is None or not best_value < before:
            break
        search = _Moves(problem, best, max(target, _NEARER * best_value))
    return best


class _Moves:
    """The state of a pass: stages, loads, bytes, and how many units of each value a stage has."""

    def __init__(self, problem: PartitionProblem, stage_of: Indices, target: float) -> None:
        self._target = target
        self.stage_of = stage_of.copy()
        n, k = problem.num_units, len(problem.slots)
        self._values = [v for v in problem.values if v.external or len(v.units) > 1]
        self._nbytes = np.array([v.nbytes for v in self._values])
        self._external = np.array([v.external for v in self._values], dtype=bool)
        self._unit = np.array([u for v in self._values for u in v.units], dtype=np.int64)
        sizes = [len(v.units) for v in self._values]
        self._value = np.repeat(np.arange(len(self._values)), sizes)
        by_unit = np.argsort(self._unit, kind="stable")
        self._unit, self._value = self._unit[by_unit], self._value[by_unit]
        self._counts = np.zeros((len(self._values), k), dtype=np.int64)
        np.add.at(self._counts, (self._value, self.stage_of[self._unit]), 1)
        self._edges = np.array(problem.edges, dtype=np.int64).reshape(-1, 2)
        self._seconds = np.array([s.seconds for s in problem.slots]).reshape(k, n)
        self._held_by = np.array([s.nbytes for s in problem.slots]).reshape(k, n)
        self._rate = np.array([s.seconds_per_byte for s in problem.slots])
        self._budget = np.array([np.inf if s.budget is None else s.budget for s in problem.slots])
        self._loads = stage_loads(problem, stage_of)
        self._held = np.array([self._held_by[q][stage_of == q].sum() for q in range(k)])
        self._free = np.ones(n, dtype=bool)
        self._pinned = np.zeros(n, dtype=bool)
        self._pinned[sorted(problem.pins)] = True

    def begin_pass(self) -> None:
        self._free = ~self._pinned

    def value(self) -> float:
        """The largest load, where all stages are within their budgets."""
        over = self._held > self._budget * (1 + 1e-12)
        return np.inf if over.any() else float(self._loads.max())

    def move(self) -> bool:
        """Make the best move off the fullest stage; whether there was one."""
        fullness = self._excess(self._loads, self._held, np.arange(len(self._loads)))
        home = int(np.argmax(np.where(fullness > 0, fullness, self._loads / self._loads.max() - 1)))
        units = np.flatnonzero(self._free & (self.stage_of == home))
        if not len(units):
            return False
        first, last = self._range()
        best, chosen = np.inf, None
        leaving, arriving = self._changes(home, units)
        for stage in range(len(self._loads)):
            allowed = (first[units] <= stage) & (stage <= last[units])
            if stage == home or not allowed.any():
                continue
            load_home = self._loads[home] + leaving[:, stage]
            load_there = self._loads[stage] + arriving[:, stage]
            held_home = self._held[home] - self._held_by[home][units]
            held_there = self._held[stage] + self._held_by[stage][units]
            excess = self._excess(load_home, held_home, home)
            excess = excess + self._excess(load_there, held_there, stage)
            excess = np.where(allowed, excess - fullness[home] - fullness[stage], np.inf)
            least = int(np.argmin(excess))
            if excess[least] < best:
                best, chosen = float(excess[least]), (least, stage)
        if chosen is None:
            return False
        index, stage = chosen
        unit = int(units[index])
        self._loads[home] += leaving[index, stage]
        self._loads[stage] += arriving[index, stage]
        self._held[home] -= self._held_by[home][unit]
        self._held[stage] += self._held_by[stage][unit]
        uses = self._value[self._unit == unit]
        self._counts[uses, home] -= 1
        self._counts[uses, stage] += 1
        self.stage_of[unit] = stage
        self._free[unit] = False
        return True

    def _excess(self, loads: Vector, held: Vector, stage: int | Indices) -> Vector:
        """Squares of what is above the target and above the budget, as shares of these."""
        above = np.maximum(0.0, loads / self._target - 1) if self._target else loads
        budget = self._budget[stage]
        over = np.maximum(0.0, held / np.maximum(budget, 1e-300) - 1)
        return np.asarray(above**2 + over**2)

    def _range(self) -> tuple[Indices, Indices]:
        """The first and the last stage that the edges allow each unit."""
        first = np.zeros(len(self.stage_of), dtype=np.int64)
        last = np.full(len(self.stage_of), len(self._loads) - 1)
        a, b = self._edges.T
        np.maximum.at(first, b, self.stage_of[a])
        np.minimum.at(last, a, self.stage_of[b])
        return first, last

    def _changes(self, home: int, units: Indices) -> tuple[Vector, Vector]:
        """``[i, q]``: change of the loads of ``home`` and of stage q as unit i moves to q."""
        number = np.full(len(self.stage_of), -1, dtype=np.int64)
        number[units] = np.arange(len(units))
        chosen = number[self._unit] >= 0
        who, value = number[self._unit[chosen]], self._value[chosen]
        counts, nbytes = self._counts[value], self._nbytes[value]
        external = self._external[value]
        stages = (counts > 0).sum(axis=1)
        alone = counts[:, home] == 1  # the last unit of the value leaves
        paid = external | (stages > 1)
        there = counts > 0
        after = stages[:, None] + ~there - alone[:, None]
        pays = external[:, None] | (after > 1)
        at_home = nbytes[:, None] * np.subtract(pays & ~alone[:, None], paid[:, None], dtype=float)
        at_stage = nbytes[:, None] * np.subtract(pays, paid[:, None] & there, dtype=float)
        count, k = len(units), len(self._loads)
        leaving, arriving = np.zeros((count, k)), np.zeros((count, k))
        if len(who):
            starts = np.flatnonzero(np.diff(who, prepend=-1))  # uses are sorted by unit
            leaving[who[starts]] = np.add.reduceat(at_home, starts) * self._rate[home]
            arriving[who[starts]] = np.add.reduceat(at_stage, starts) * self._rate
        leaving -= self._seconds[home][units][:, None]
        arriving += self._seconds[:, units].T
        return leaving, arriving
