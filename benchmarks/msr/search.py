"""Place a workload by placer's own search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.msr.cycles import Reduction, join_cycles
from benchmarks.msr.isolated import assign_isolated, isolated_units, without_units
from placer.partition import PartitionProblem
from placer.partition import solve as solve_plain
from placer.partition.solver.search import StageOf


def solve(problem: PartitionProblem) -> StageOf | None:
    """What placer's search finds: cycles are joined before, isolated units placed afterwards."""
    joined = join_cycles(problem)
    rest, number = without_units(joined.problem, isolated_units(joined.problem))
    # No more stages than units.
    few = replace(rest, slots=rest.slots[: max(1, rest.num_units)])
    return _placed(joined, number, solve_plain(few))


def _placed(joined: Reduction, number: NDArray[np.int64], found: StageOf | None) -> StageOf | None:
    """The stages of all units, where ``found`` has those of the ones with edges."""
    if found is None:
        return None
    stage_of = np.where(number < 0, -1, found[number])
    return assign_isolated(joined.problem, stage_of)[joined.unit_of]
