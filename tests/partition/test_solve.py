"""Compares `solve` with all placements of small problems, and checks its rules on larger ones."""

from __future__ import annotations

import dataclasses

import numpy as np
from problems import follows_rules, least_load, random_problem, tight_problem

from benchmarks.scale import layered_problem
from placer.partition import solve, stage_loads
from placer.partition.solver.interval import best_intervals
from placer.partition.solver.problem import simple_bound


def test_answers_against_all_placements() -> None:
    best = solved = 0
    for seed in [*range(25), 550]:  # in 550 the last unit of the order is no sink of all others
        problem = random_problem(seed)
        least = least_load(problem)
        found = solve(problem)
        if found is None:
            continue
        solved += 1
        assert follows_rules(problem, found), seed
        value = stage_loads(problem, found).max()
        assert least * (1 - 1e-9) <= value <= 1.2 * least, seed
        assert simple_bound(problem) <= least * (1 + 1e-9), seed
        best += value <= least * (1 + 1e-9)
    assert solved >= 22
    assert best >= 0.9 * solved


def test_memory_parts_what_is_joined_for_time() -> None:
    problem = tight_problem()
    stage_of = solve(problem)
    assert stage_of is not None and stage_of.tolist() == [0, 0, 0, 1, 1]
    assert solve(tight_problem(budget=3.0)) is None
    named = tuple(
        dataclasses.replace(slot, device=name)
        for slot, name in zip(problem.slots, ("first", "second"), strict=True)
    )
    crossed = dataclasses.replace(problem, slots=named, pins={0: "second", 4: "first"})
    assert solve(crossed) is None


def test_large_graphs_keep_the_rules() -> None:
    problem = layered_problem(1_501, 3)
    slots = tuple(
        dataclasses.replace(slot, device=f"d{q}", budget=float(slot.nbytes.sum()) * 0.45)
        for q, slot in enumerate(problem.slots)
    )
    problem = dataclasses.replace(problem, slots=slots, pins={3: "d0", 1_490: "d2"})
    stage_of = solve(problem)
    assert stage_of is not None
    assert follows_rules(problem, stage_of)
    whole = best_intervals(problem, np.arange(problem.num_units), np.inf)
    assert whole is not None
    value = stage_loads(problem, stage_of).max()
    assert value <= stage_loads(problem, whole).max() * (1 + 1e-9)
    assert simple_bound(problem) <= value <= 1.2 * simple_bound(problem)
