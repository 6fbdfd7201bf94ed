"""Place a workload by placer's own search, and bound the largest load of any placement by the referee."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.msr.cycles import Reduction, join_cycles
from benchmarks.msr.isolated import assign_isolated, isolated_units, without_units
from benchmarks.msr.proof.search import Solution, as_solution
from benchmarks.msr.proof.search import solve as prove
from placer.partition import PartitionProblem
from placer.partition import solve as solve_plain
from placer.partition.solver.problem import largest_load
from placer.partition.solver.search import StageOf


def search_plainly(problem: PartitionProblem) -> StageOf | None:
    """What placer's search finds: cycles are joined before, isolated units placed afterwards."""
    joined = join_cycles(problem)
    rest, number = without_units(joined.problem, isolated_units(joined.problem))
    return _placed(joined, number, solve_plain(_without_empty_stages(rest)))


def solve(problem: PartitionProblem) -> Solution | None:
    """The better of what placer's search and the referee find, and a lower bound on all placements.

    The bound is that of the units with edges, since the others only add to loads: the best placement of a
    graph with isolated units may be above it, and is not proven then.
    """
    if not problem.num_units:
        return Solution(stage_of=np.zeros(0, dtype=np.int64), value=0.0, lower_bound=0.0)
    joined = join_cycles(problem)
    rest, number = without_units(joined.problem, isolated_units(joined.problem))
    proven, plain = prove(_without_empty_stages(rest)), search_plainly(problem)
    placed = None if proven is None else _placed(joined, number, proven.stage_of)
    if proven is None or plain is None or placed is None:
        return None
    best = min(placed, plain, key=lambda found: largest_load(problem, found))
    return as_solution(problem, best, proven.lower_bound)


def _without_empty_stages(problem: PartitionProblem) -> PartitionProblem:
    """The problem with no more stages than units."""
    return replace(problem, slots=problem.slots[: max(1, problem.num_units)])


def _placed(joined: Reduction, number: NDArray[np.int64], found: StageOf | None) -> StageOf | None:
    """The stages of all units, where ``found`` has those of the ones with edges."""
    if found is None:
        return None
    stage_of = np.where(number < 0, -1, found[number])
    return assign_isolated(joined.problem, stage_of)[joined.unit_of]
