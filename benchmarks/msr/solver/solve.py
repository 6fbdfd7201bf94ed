"""Solve a partition problem whose graph may have units without edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.msr.proof.conditions import BoundaryConditions
from benchmarks.msr.proof.search import (
    MOST_ALIVE,
    Answer,
    ProvingSearch,
    Solution,
    as_solution,
    is_reached,
    proof_work,
)
from benchmarks.msr.proof.work import Work
from benchmarks.msr.solver.assign import assign_isolated
from benchmarks.msr.solver.branch import branch_isolated
from benchmarks.msr.solver.conditions import partial_conditions
from benchmarks.msr.solver.folds import fold_dominated
from benchmarks.msr.solver.lattice import (
    PartialLattice,
    build_partial_lattice,
    isolated_units,
    without_units,
)
from benchmarks.msr.solver.limits import Best, is_limited, is_tight, memory_as_load
from benchmarks.msr.solver.moves import move_units
from benchmarks.msr.solver.pairs import PartialFamily
from benchmarks.msr.solver.reduce import Reduction, contract, join_cycles
from placer.partition import PartitionProblem
from placer.partition import solve as solve_plain
from placer.partition.solver.families import chain_rows, distinct
from placer.partition.solver.lattice import Words, topological_order
from placer.partition.solver.problem import simple_bound
from placer.partition.solver.program import Boundaries
from placer.partition.solver.search import StageOf, adjacency
from placer.partition.solver.solve import LARGE


class PartialSearch(ProvingSearch):
    """placer's search over downsets of all units but the isolated ones, which are placed afterwards."""

    lattice: PartialLattice

    def __init__(self, problem: PartitionProblem) -> None:
        loose = set(isolated_units(problem))
        order = topological_order(*adjacency(problem), range(problem.num_units))
        lattice = build_partial_lattice(problem, [u for u in order if u not in loose])
        super().__init__(lattice)

    def conditions(self, bound: float) -> BoundaryConditions:
        """With what isolated units cost either side of a boundary at least."""
        return partial_conditions(self.lattice, bound)

    def family(self, rows: Words) -> PartialFamily:
        """With what isolated units cost a stage at least."""
        return PartialFamily(self.lattice, rows)

    def stages(self, boundaries: Boundaries) -> StageOf:
        """Isolated units go where they cost least."""
        return assign_isolated(self.problem, super().stages(boundaries))

    def first_answer(self) -> StageOf | None:
        """The best placement with boundaries from a few orders and a beam search.

        Where a budget may have ruled out a better one, an order of small memory is tried as well.
        """
        best, value = None, np.inf
        for rows in self.first_families():
            best, value = self.improve(rows, best, value)
        if is_limited(self.problem) and (best is None or is_tight(self.problem, best)):
            smallest = self.least_memory()
            if smallest is not None:
                units = self.lattice.num_units
                order = np.lexsort((np.arange(units), smallest[self.lattice.order]))
                rows = distinct(np.concatenate([rows, chain_rows(self.lattice, order)]))
                best, _ = self.improve(rows, best, value)
        return best

    def least_memory(self) -> StageOf | None:
        """A placement whose largest share of a budget is small."""
        problem = memory_as_load(self.problem)
        folded = _folded(problem, fold_dominated(problem, relaxed=True))
        found = type(self)(folded.problem).first_answer()
        return None if found is None else found[folded.unit_of]


class BranchedSearch(PartialSearch):
    """Proves with branch and bound where the isolated units are."""

    def best_within(self, rows: Words, limit: float, work: Work) -> Answer:
        """The best placement with its boundaries among ``rows``, isolated units anywhere."""
        return branch_isolated(self.lattice, rows, limit, work)


def solve(problem: PartitionProblem, *, most_alive: int = MOST_ALIVE) -> Solution | None:
    """As `benchmarks.msr.proof.search.solve` where stages may be empty, and much faster if many units have
    no edges.

    The proof is by branch and bound over the stages of these units, where relaxations do not
    suffice.
    """
    slots = problem.slots
    if all(slot is slots[0] for slot in slots):
        problem = replace(problem, slots=slots[: max(1, problem.num_units)])  # more stay empty
    joined = join_cycles(problem)
    if joined.problem.num_units > LARGE:
        stage_of, bound = _solve_large(joined.problem), simple_bound(joined.problem)
    else:
        stage_of, bound = _solve_joined(joined.problem, most_alive, proof_work(most_alive))
    return None if stage_of is None else as_solution(problem, stage_of[joined.unit_of], bound)


def search_plainly(problem: PartitionProblem) -> StageOf | None:
    """What placer's own search finds: cycles are joined before, isolated units placed afterwards."""
    joined = join_cycles(problem)
    rest, number = without_units(joined.problem, isolated_units(joined.problem))
    found = solve_plain(rest)
    if found is None:
        return None
    stage_of = np.where(number < 0, -1, found[number])
    return assign_isolated(joined.problem, stage_of)[joined.unit_of]


def _solve_large(problem: PartitionProblem) -> StageOf | None:
    """The best placement that placer finds on the first stages, however many of them."""
    best = Best(problem)
    for count in range(1, len(problem.slots) + 1):
        found = solve_plain(replace(problem, slots=problem.slots[:count]))
        best.offer(found)
    return best.stage_of


def _solve_joined(
    problem: PartitionProblem, most_alive: int, work: Work
) -> tuple[StageOf | None, float]:
    """The best placement of a problem whose edges have no cycle, and a lower bound."""
    best, bound = Best(problem), simple_bound(problem)
    relaxed = fold_dominated(problem, relaxed=True)
    folded = _folded(problem, relaxed)
    best.offer(_unfolded(PartialSearch(folded.problem).first_answer(), folded))
    moved = False  # the best one, over worse placements, without finding a better one
    for rung, (reduction, search) in enumerate(_ladder(problem, relaxed)):
        if rung and best.is_tight and type(search) is PartialSearch:
            best.offer(_unfolded(search.first_answer(), reduction))
        if best.stage_of is None and is_limited(problem):
            smallest, _ = _solve_joined(memory_as_load(problem), most_alive, Work(work.left / 2))
            best.offer(smallest)
        best.improve(bound)
        search.bound = max(search.bound, bound)
        found = _unfolded(search.prove(best.value, most_alive, work), reduction)
        bound = search.bound
        best.offer(found)
        moved = False
        if found is not None and not is_reached(best.value, bound):
            moved = best.offer(move_units(problem, found, bound))
        if is_reached(best.value, bound):
            break
    if not moved:
        best.improve(bound)
    return best.stage_of, bound


def _folded(problem: PartitionProblem, relaxed: Reduction) -> Reduction:
    """The problem with the units of ``relaxed``, which hold their bytes where they are."""
    return contract(problem, relaxed.unit_of.tolist())


def _unfolded(stage_of: StageOf | None, reduction: Reduction) -> StageOf | None:
    return None if stage_of is None else stage_of[reduction.unit_of]


def _ladder(
    problem: PartitionProblem, relaxed: Reduction
) -> Iterator[tuple[Reduction, PartialSearch]]:
    """Reductions to prove on, from the loosest to the exact one.

    Folds are exact but for budgets, isolated units that are left out but for budgets and for what they cost
    among themselves.
    """
    yield relaxed, PartialSearch(relaxed.problem)
    exact = fold_dominated(problem, weightless=True)
    if exact.problem.num_units > relaxed.problem.num_units:
        yield exact, PartialSearch(exact.problem)
    if isolated_units(exact.problem):
        yield exact, BranchedSearch(exact.problem)
