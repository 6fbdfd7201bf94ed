"""Solve a partition problem: find a placement of small largest load, and a lower bound on all."""

from __future__ import annotations

import numpy as np

from placer.partition.solver.interval import best_intervals
from placer.partition.solver.lattice import topological_order
from placer.partition.solver.moves import move_units
from placer.partition.solver.problem import (
    PartitionProblem,
    Solution,
    is_limited,
    is_tight,
    is_within_budgets,
    largest_load,
    load_above_all,
    memory_as_load,
    simple_bound,
)
from placer.partition.solver.reduce import Reduction, join_cycles
from placer.partition.solver.search import (
    DownsetSearch,
    StageOf,
    adjacency,
    is_reached,
    newest_first,
)
from placer.partition.solver.work import Work
from placer.plan.types import Optimality

MOST_ALIVE = 150_000  # partly decided downsets at a time in a proof: about a second
LARGE = 1500  # units; with more, stages are intervals of one order
_WORK, _LEAST_WORK = 7e3, 3e8  # nanoseconds for all proofs of a problem: per downset, and at least


def solve(problem: PartitionProblem, *, most_alive: int = MOST_ALIVE) -> Solution | None:
    """A placement of small largest load, with a lower bound on that of any placement.

    A first answer comes from the downsets of a few orders and a beam search. Then all downsets that
    a better placement could have are enumerated, unless there are more than ``most_alive`` partly
    decided ones at a time or it takes too much work: the answer is then optimal
    (`Optimality.proven`). With more than 1,500 units, stages are intervals of one order and nothing is
    proven. Deterministic. None when no placement was found within the budgets.
    """
    joined = join_cycles(problem)
    if joined.problem.num_units > LARGE:
        return _solve_large(problem, joined)
    stage_of, bound = _solve_small(joined.problem, most_alive, proof_work(most_alive))
    return None if stage_of is None else as_solution(problem, stage_of[joined.unit_of], bound)


def proof_work(most_alive: int) -> Work:
    """The work that the proofs of one problem may take together."""
    return Work(max(_LEAST_WORK, _WORK * most_alive))


def as_solution(problem: PartitionProblem, stage_of: StageOf, bound: float) -> Solution:
    """``stage_of`` with its largest load and the lower bound ``bound``."""
    value = largest_load(problem, stage_of)
    return Solution(
        stage_of=tuple(stage_of.tolist()),
        optimality=Optimality(
            criterion="largest stage load", value=value, lower_bound=min(bound, value)
        ),
    )


def lower_bound(problem: PartitionProblem) -> float:
    """No placement has a lower largest load; O(n)."""
    return simple_bound(join_cycles(problem).problem)


class Best:
    """The best placement of ``problem`` so far that is within the budgets."""

    def __init__(self, problem: PartitionProblem) -> None:
        self._problem = problem
        self.stage_of: StageOf | None = None
        self.value = np.inf

    @property
    def is_tight(self) -> bool:
        """Whether budgets may have ruled out a better placement, or all."""
        return self.stage_of is None or is_tight(self._problem, self.stage_of)

    def offer(self, stage_of: StageOf | None) -> bool:
        """Keep ``stage_of`` if it is better; returns whether it is."""
        if stage_of is None:
            return False
        value = largest_load(self._problem, stage_of)
        better = value < self.value and is_within_budgets(self._problem, stage_of)
        if better:
            self.stage_of, self.value = stage_of, value
        return better

    def improve(self, bound: float) -> None:
        """Move units one by one if budgets matter and the placement is not optimal by ``bound``."""
        if self.stage_of is not None and self.is_tight and not is_reached(self.value, bound):
            self.offer(move_units(self._problem, self.stage_of, bound))


def _solve_small(
    problem: PartitionProblem, most_alive: int, work: Work
) -> tuple[StageOf | None, float]:
    """The best placement of a problem whose edges have no cycle, and a lower bound."""
    best, bound = Best(problem), simple_bound(problem)
    search = DownsetSearch(problem)
    best.offer(search.first_answer())
    if best.stage_of is None and is_limited(problem):
        best.offer(_solve_small(memory_as_load(problem), most_alive, Work(work.left / 2))[0])
    best.improve(bound)
    bound, found = search.prove(best.value, most_alive, work, bound=bound)
    best.offer(found)
    moved = False
    if found is not None and not is_reached(best.value, bound):
        moved = best.offer(move_units(problem, found, bound))
    if not moved:
        best.improve(bound)
    return best.stage_of, bound


def _solve_large(problem: PartitionProblem, joined: Reduction) -> Solution | None:
    """The best intervals of a few orders; the bound is `simple_bound`."""
    small = joined.problem
    preds, succs = adjacency(small)
    orders = [
        topological_order(preds, succs, range(small.num_units)),
        newest_first(preds, succs),
        newest_first(succs, preds)[::-1],
    ]
    best, value = None, load_above_all(small)
    for order in orders:
        found = best_intervals(small, np.array(order, dtype=np.int64), value)
        if found is not None:
            best, value = found, largest_load(small, found)
    return None if best is None else as_solution(problem, best[joined.unit_of], simple_bound(small))
