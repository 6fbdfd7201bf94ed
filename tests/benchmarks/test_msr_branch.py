"""Branch and bound for isolated units, compared with all placements of small problems."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.msr.proof.search import Answer
from benchmarks.msr.proof.surviving import surviving_rows
from benchmarks.msr.proof.work import Work
from benchmarks.msr.solver.branch import branch_isolated
from benchmarks.msr.solver.conditions import partial_conditions
from benchmarks.msr.solver.lattice import build_partial_lattice, isolated_units
from benchmarks.msr.solver.solve import solve
from placer.partition import PartitionProblem, SharedValue, StageSlot, stage_loads


def problem_with_isolated_units(seed: int) -> PartitionProblem:
    """Four units in a diamond or a chain, and three that share values with them and each other."""
    rng = np.random.default_rng(seed)
    edges = ((0, 1), (0, 2), (1, 3), (2, 3)) if seed % 2 else ((0, 1), (1, 2), (2, 3))
    values = [SharedValue(nbytes=float(rng.integers(1, 9)), units=edge) for edge in edges]
    for f in (4, 5, 6):
        for _ in range(int(rng.integers(1, 4))):
            others = rng.choice([u for u in range(7) if u != f], size=rng.integers(1, 4))
            units = (f, *sorted(set(others.tolist())))
            values.append(SharedValue(nbytes=float(rng.integers(1, 9)), units=units))
    k = 2 + seed % 3 // 2
    seconds, nbytes = (rng.integers(0, 9, 7).astype(float) for _ in range(2))
    budget = float(nbytes.sum()) / k * rng.uniform(1.0, 1.6) if seed % 4 else None
    slots = tuple(
        StageSlot(
            device="d",
            seconds=seconds * (1 + q * (seed % 5 == 0)),
            seconds_per_byte=1.0 + 0.5 * q * (seed % 7 == 0),
            nbytes=nbytes,
            budget=budget,
        )
        for q in range(k)
    )
    return PartitionProblem(num_units=7, edges=edges, values=tuple(values), slots=slots)


def least_load(problem: PartitionProblem) -> float:
    best = np.inf
    for choice in itertools.product(range(len(problem.slots)), repeat=problem.num_units):
        stage_of = np.array(choice)
        if is_allowed(problem, stage_of):
            best = min(best, float(stage_loads(problem, stage_of).max()))
    return best


def is_allowed(problem: PartitionProblem, stage_of: np.ndarray) -> bool:
    return all(stage_of[a] <= stage_of[b] for a, b in problem.edges) and all(
        s.budget is None or s.nbytes[stage_of == q].sum() <= s.budget
        for q, s in enumerate(problem.slots)
    )


def branched(problem: PartitionProblem, limit: float, work: float) -> Answer:
    loose = isolated_units(problem)
    lattice = build_partial_lattice(problem, [u for u in range(7) if u not in loose])
    rows = surviving_rows(partial_conditions(lattice, limit), most=1_000)
    assert rows is not None
    return branch_isolated(lattice, rows, limit, Work(work))


@pytest.mark.parametrize("seed", range(16))
def test_a_finished_search_has_the_least_load_of_all_placements(seed: int) -> None:
    problem = problem_with_isolated_units(seed)
    assert isolated_units(problem) == [4, 5, 6]
    least = least_load(problem)
    found = branched(problem, 1e3, 1e12)
    assert found.finished
    if least == np.inf:
        assert found.stage_of is None
        assert solve(problem) is None
        return
    assert is_allowed(problem, found.stage_of)
    assert stage_loads(problem, found.stage_of).max() == pytest.approx(least)
    assert found.bound == pytest.approx(least)
    none = branched(problem, least * (1 - 1e-9), 1e12)  # nothing is below
    assert none.finished and none.stage_of is None
    solution = solve(problem)
    assert solution is not None and solution.proven
    assert solution.value == pytest.approx(least)


@pytest.mark.parametrize("seed", range(8))
def test_a_search_that_was_stopped_has_a_bound_on_all_placements(seed: int) -> None:
    problem = problem_with_isolated_units(seed)
    problem = dataclasses.replace(problem, slots=problem.slots[:1] * 3)
    least = least_load(problem)
    bounds = []
    for work in (1e5, 1e6, 3e6, 1e7, 1e12):
        found = branched(problem, 1e3, work)
        bounds.append(found.bound)
        assert found.bound <= min(least, 1e3) * (1 + 1e-9)
        if found.stage_of is not None:
            assert is_allowed(problem, found.stage_of)
    assert bounds == sorted(bounds)
