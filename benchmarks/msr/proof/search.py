"""Finds the best placement of all, or a placement and a lower bound on all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.msr.proof.conditions import BoundaryConditions, find_sides
from benchmarks.msr.proof.program import CountedFamily, best_within_work
from benchmarks.msr.proof.surviving import surviving_rows
from benchmarks.msr.proof.work import OutOfWork, Work
from placer.partition import PartitionProblem
from placer.partition.solver.lattice import Lattice, Words
from placer.partition.solver.problem import largest_load, load_above_all, simple_bound
from placer.partition.solver.search import DownsetSearch, StageOf, whole_lattice

MOST_ALIVE = 150_000  # partly decided downsets at a time in a proof; takes about a second
_WORK, _LEAST_WORK = 7e3, 3e8  # nanoseconds for all proofs of a problem: per downset, and the least
_FEW = 10  # the first attempt gets a tenth of the downsets, which suffices for most problems
_FIRST_SHARE = 1 / 16  # of the gap between bound and value
_MOST_FAILED = 3  # attempts with too many downsets, besides the first
_MOST_BITS = 20_000_000  # of all downsets together, to limit their memory
_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """The stage of every unit, its largest load, and a lower bound on that of any placement."""

    stage_of: StageOf
    value: float
    lower_bound: float

    @property
    def proven(self) -> bool:
        """Whether no placement is better."""
        return is_reached(self.value, self.lower_bound)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The best placement below a limit, if any was found, and a lower bound on all placements.

    If ``finished``, the bound is the placement's load, or the limit if no placement is below it.
    """

    stage_of: StageOf | None
    bound: float
    finished: bool


def is_reached(value: float, bound: float) -> bool:
    """Whether ``value`` is equal to the lower bound ``bound``, except for rounding."""
    return value <= bound * (1 + _TOLERANCE)


def solve(problem: PartitionProblem, *, most_alive: int = MOST_ALIVE) -> Solution | None:
    """A placement with a small largest load, and a lower bound on the largest load of any placement.

    A first answer is placer's. Then all downsets that a better placement could have are enumerated, and
    the result is optimal, unless there are more than ``most_alive`` partly decided downsets at a time or it
    takes too much work. None if no placement within the budgets was found.
    """
    search = ProvingSearch(whole_lattice(problem))
    first = search.first_answer()
    value = np.inf if first is None else largest_load(problem, first)
    better = search.prove(value, most_alive, proof_work(most_alive))
    stage_of = first if better is None else better
    return None if stage_of is None else as_solution(problem, stage_of, search.bound)


def proof_work(most_alive: int) -> Work:
    """The work that all proofs of one problem may take together."""
    return Work(max(_LEAST_WORK, _WORK * most_alive))


def as_solution(problem: PartitionProblem, stage_of: StageOf, bound: float) -> Solution:
    """``stage_of`` with its largest load and the lower bound ``bound``."""
    value = largest_load(problem, stage_of)
    return Solution(stage_of=stage_of, value=value, lower_bound=min(bound, value))


class ProvingSearch(DownsetSearch):
    """placer's search; ``bound`` is a lower bound on all placements, which `prove` raises."""

    def __init__(self, lattice: Lattice) -> None:
        super().__init__(lattice)
        self.bound = simple_bound(self.problem)

    def family(self, rows: Words) -> CountedFamily:
        return CountedFamily(self.lattice, rows)

    def conditions(self, bound: float) -> BoundaryConditions:
        """Conditions for the boundaries of placements with all loads below ``bound``."""
        return BoundaryConditions(self.lattice, find_sides(self.lattice), bound)

    def best_within(self, rows: Words, limit: float, work: Work) -> Answer:
        """The best placement below ``limit`` with its boundaries among ``rows``."""
        try:
            boundaries = best_within_work(self.family(rows), limit, work)
        except OutOfWork:
            return Answer(stage_of=None, bound=0.0, finished=False)
        if boundaries is None:
            return Answer(stage_of=None, bound=limit, finished=True)
        return Answer(stage_of=self.stages(boundaries), bound=boundaries.value, finished=True)

    def prove(self, value: float, most_alive: int, work: Work) -> StageOf | None:
        """Raise ``bound``, and return the best placement if one below ``value`` was found.

        All placements below a limit have boundaries that satisfy its conditions, and the number of such
        downsets grows exponentially with the limit. So first ``value`` is tried as the limit, with few
        downsets. Then limits are tried upwards from ``bound``; the first limit
        with a placement below it gives the best one. If there are too many downsets, limits between that
        one and the last without a placement are tried, as long as there is ``work`` left.
        """
        least = self.bound
        if is_reached(value, least) or not most_alive:
            return None
        if not np.isfinite(value):
            value = load_above_all(self.problem)
        left = min(most_alive, _MOST_BITS // max(1, self.lattice.num_units))
        # Shares of the gap: up to ``empty`` there is no placement, from ``full`` on too many downsets.
        empty, full = 0.0, np.inf
        share, most, failed = 1.0, left // _FEW, 0
        while failed <= _MOST_FAILED and left > 0 and not work.is_spent():
            limit = (least + share * (value - least)) * (1 - _TOLERANCE)
            rows = surviving_rows(self.conditions(limit), most=most, work=work)
            if rows is None:
                failed += 1
                full = share if failed > 1 else np.inf
                most = left if failed == 1 else most // 2
            else:
                answer = self.best_within(rows, limit, work)
                if answer.stage_of is not None or not answer.finished:
                    known = max(least, answer.bound, least + empty * (value - least))
                    self.bound = known * (1 if answer.finished else 1 - _TOLERANCE)
                    return answer.stage_of
                if share == 1.0:
                    self.bound = value
                    return None
                empty, left = share, left - len(rows)
                most = min(most, left)
            share = (empty + full) / 2 if full <= 1 else min(1.0, max(_FIRST_SHARE, 4 * empty))
        self.bound = (least + empty * (value - least)) * (1 - _TOLERANCE)
        return None
