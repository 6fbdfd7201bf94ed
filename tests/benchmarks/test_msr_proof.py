"""Compares proven answers with all placements of small problems."""

from __future__ import annotations

import dataclasses

import networkx as nx
import numpy as np
import pytest
from problems import follows_rules, least_load, random_problem, tight_problem

from benchmarks.msr.proof.conditions import BoundaryConditions, find_sides
from benchmarks.msr.proof.search import solve
from benchmarks.msr.proof.surviving import surviving_rows
from placer.partition import PartitionProblem, stage_loads
from placer.partition.solver.lattice import Lattice, build_lattice


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


def all_downsets(lattice: Lattice) -> set[int]:
    """By definition, as bits."""
    edges = [(a, b) for b, sources in enumerate(lattice.preds) for a in sources]
    rows = range(1 << lattice.num_units)
    return {row for row in rows if all(row >> a & 1 or not row >> b & 1 for a, b in edges)}


@pytest.mark.parametrize("seed", (1, 2, 3, 5))
def test_a_bound_that_closes_nothing_leaves_all_downsets(seed: int) -> None:
    problem = random_problem(seed)
    slots = tuple(dataclasses.replace(slot, budget=None) for slot in problem.slots)
    problem = dataclasses.replace(problem, slots=slots, pins={})
    lattice = build_lattice(problem, topological_sort(problem))
    rows = surviving_rows(BoundaryConditions(lattice, find_sides(lattice), 1e9), most=10_000)
    assert rows is not None
    assert {int(row[0]) for row in rows} == all_downsets(lattice)


def topological_sort(problem: PartitionProblem) -> list[int]:
    graph = nx.DiGraph(problem.edges)
    graph.add_nodes_from(range(problem.num_units))
    return list(nx.lexicographical_topological_sort(graph))


def test_a_tight_budget_parts_what_is_joined_for_time() -> None:
    solution = solve(tight_problem())
    assert solution is not None and solution.proven
    assert solution.stage_of.tolist() == [0, 0, 0, 1, 1]
