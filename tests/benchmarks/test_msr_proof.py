"""Compares proven answers with all placements of small problems."""

from __future__ import annotations

import numpy as np
import pytest
from problems import follows_rules, least_load, random_problem

from benchmarks.msr.proof.search import solve
from placer.partition import stage_loads


def test_answers_are_the_best_of_all_placements() -> None:
    solved = 0
    for seed in [*range(25), 550]:  # in 550 the last unit of the order is no sink of all others
        problem = random_problem(seed)
        least = least_load(problem)
        solution = solve(problem)
        if solution is None:
            assert least == np.inf, seed
            continue
        solved += 1
        assert follows_rules(problem, solution.stage_of), seed
        assert solution.proven, seed
        assert solution.value == pytest.approx(least), seed
        assert stage_loads(problem, solution.stage_of).max() == pytest.approx(least), seed
    assert solved >= 22
