"""The solver for units without edges, compared with integer programming and with placer's solver."""

from __future__ import annotations

import numpy as np
import pytest
from problems import tight_problem

from benchmarks.msr.proof.search import solve as prove
from benchmarks.msr.solver.moves import move_units
from benchmarks.msr.solver.solve import solve
from placer.partition import PartitionProblem, SharedValue, StageSlot

optimize = pytest.importorskip("scipy.optimize")


def random_problem(seed: int) -> PartitionProblem:
    """Eight units with edges, five without, three stages; every other one with budgets."""
    rng = np.random.default_rng(seed)
    edges = tuple((int(rng.integers(0, b)), b) for b in range(1, 8))
    values = [SharedValue(nbytes=float(rng.integers(1, 9)), units=edge) for edge in edges]
    for free in range(8, 13):
        for _ in range(int(rng.integers(1, 4))):
            others = rng.choice([u for u in range(13) if u != free], size=2, replace=False)
            values.append(
                SharedValue(
                    nbytes=float(rng.integers(1, 9)), units=(free, *sorted(others.tolist()))
                )
            )
    seconds, nbytes = (rng.integers(0, 9, 13).astype(float) for _ in range(2))
    slot = StageSlot(
        device="d",
        seconds=seconds,
        seconds_per_byte=1.0,
        nbytes=nbytes,
        budget=float(nbytes.sum()) * 0.4 if seed % 2 else None,
    )
    return PartitionProblem(num_units=13, edges=edges, values=tuple(values), slots=(slot,) * 3)


def least_load(problem: PartitionProblem) -> float:
    """By `scipy.optimize.milp`; infinite where no placement is within the budgets.

    Variables: unit u is on stage q; stage q has some but not all units of value v; the largest load.
    """
    n, k, m = problem.num_units, len(problem.slots), len(problem.values)
    on = np.arange(n * k).reshape(n, k)
    pays = n * k + np.arange(m * k).reshape(m, k)
    largest = n * k + m * k
    rows, low, high = [], [], []

    def constrain(terms: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(largest + 1)
        for variable, factor in terms.items():
            row[variable] = factor
        rows.append(row)
        low.append(least)
        high.append(most)

    for u in range(n):
        constrain({int(i): 1.0 for i in on[u]}, 1, 1)
    for a, b in problem.edges:
        forward = {int(on[b, q]): float(q) for q in range(k)}
        constrain(forward | {int(on[a, q]): -float(q) for q in range(k)}, 0, np.inf)
    for q, slot in enumerate(problem.slots):
        for v, value in enumerate(problem.values):
            for a in value.units:
                for b in set(value.units) - {a}:
                    constrain({pays[v, q]: 1.0, on[a, q]: -1.0, on[b, q]: 1.0}, 0, np.inf)
        load = {int(on[u, q]): float(slot.seconds[u]) for u in range(n)}
        load |= {
            int(pays[v, q]): slot.seconds_per_byte * value.nbytes
            for v, value in enumerate(problem.values)
        }
        constrain(load | {largest: -1.0}, -np.inf, 0)
        if slot.budget is not None:
            held = {int(on[u, q]): float(slot.nbytes[u]) for u in range(n)}
            constrain(held, 0, slot.budget)
    cost, whole = np.zeros(largest + 1), np.ones(largest + 1)
    cost[largest], whole[largest] = 1.0, 0.0
    found = optimize.milp(
        cost,
        integrality=whole,
        bounds=optimize.Bounds(0, np.append(np.ones(largest), np.inf)),
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
    )
    return float(found.fun) if found.x is not None else np.inf


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_an_integer_program(seed: int) -> None:
    problem = random_problem(seed)
    least = least_load(problem)
    for answer in (solve(problem), prove(problem)):
        if answer is None:
            assert least == np.inf
            continue
        assert answer.value == pytest.approx(least)
        assert answer.proven


def test_units_move_until_a_tight_budget_is_kept() -> None:
    problem = tight_problem()
    moved = move_units(problem, np.array([0, 0, 1, 1, 1]), 7.0)
    assert moved is not None and moved.tolist() == [0, 0, 0, 1, 1]
    small = tight_problem(budget=3.0)
    assert move_units(small, moved, 7.0) is None
