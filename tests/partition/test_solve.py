"""Compares `solve` with all placements of small problems, and checks its guarantees on larger ones."""

from __future__ import annotations

import dataclasses
import itertools

import networkx as nx
import numpy as np
import pytest
from numpy.typing import NDArray
from problems import tight_problem

from benchmarks.scale import layered_problem
from placer.partition import PartitionProblem, SharedValue, StageSlot, solve, stage_loads
from placer.partition.solver.conditions import BoundaryConditions, find_sides
from placer.partition.solver.interval import best_intervals
from placer.partition.solver.lattice import Lattice, build_lattice
from placer.partition.solver.surviving import surviving_rows


def random_problem(seed: int) -> PartitionProblem:
    """7 units on 2 or 3 stages: branches, units without edges, pins, budgets, two kinds of devices."""
    rng = np.random.default_rng(seed)
    n, k = 7, int(rng.integers(2, 4))
    graph = nx.DiGraph(
        [(a, b) for a, b in itertools.combinations(range(n), 2) if rng.random() < 0.3]
    )
    values = [
        SharedValue(nbytes=float(rng.integers(1, 9)), units=(u, *sorted(graph.successors(u))))
        for u in graph
        if graph.out_degree(u)
    ]
    tied = {u for edge in graph.edges for u in edge}
    for u in set(range(n)) - tied:  # gradients that are added up belong to no forward unit
        for other in rng.choice(sorted(tied), size=2, replace=False).tolist():
            values.append(SharedValue(nbytes=float(rng.integers(1, 9)), units=(other, u)))
    rng.random()  # so that the problems stay as they were
    if rng.random() < 0.4:
        values.append(SharedValue(nbytes=2.0, units=(0, 3), external=True))
    seconds = rng.integers(0, 9, n).astype(float)
    nbytes = rng.integers(1, 9, n).astype(float)
    tight = rng.random() < 0.5
    slots = []
    for q in range(k):
        fast = float(rng.choice([0.5, 1.0])) if seed % 3 == 0 else 1.0
        held = nbytes * (k - q if seed % 2 else 1)  # as micro-batches in flight
        budget = float(held.sum()) * float(rng.uniform(0.4, 0.9)) if tight else None
        slots.append(
            StageSlot(
                device=f"d{q}",
                seconds=seconds * fast,
                seconds_per_byte=1.0,
                nbytes=held,
                budget=budget,
            )
        )
    pins = {2: "d0", 5: f"d{k - 1}"} if seed % 5 == 0 else {}
    return PartitionProblem(
        num_units=n,
        edges=tuple(graph.edges),
        values=tuple(values),
        slots=tuple(slots),
        pins=pins,
    )


def follows_rules(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> bool:
    return (
        all(stage_of[a] <= stage_of[b] for a, b in problem.edges)
        and all(problem.slots[stage_of[u]].device == d for u, d in problem.pins.items())
        and all(
            slot.budget is None or slot.nbytes[stage_of == q].sum() <= slot.budget
            for q, slot in enumerate(problem.slots)
        )
        and len(set(stage_of.tolist())) == len(problem.slots)
    )


def least_load(problem: PartitionProblem) -> float:
    stages = range(len(problem.slots))
    best = np.inf
    for choice in itertools.product(stages, repeat=problem.num_units):
        stage_of = np.array(choice)
        if follows_rules(problem, stage_of):
            best = min(best, stage_loads(problem, stage_of).max())
    return float(best)


def test_answers_and_bounds_against_all_placements() -> None:
    proven = solved = 0
    for seed in [*range(25), 550]:  # in 550 the last unit of the order is no sink of all others
        problem = random_problem(seed)
        least = least_load(problem)
        solution = solve(problem)
        if solution is None:
            assert least == np.inf, seed
            continue
        solved += 1
        assert follows_rules(problem, np.array(solution.stage_of)), seed
        found = solution.optimality
        assert found.value == pytest.approx(
            stage_loads(problem, np.array(solution.stage_of)).max()
        ), seed
        assert found.lower_bound <= least * (1 + 1e-9), seed
        assert found.value >= least * (1 - 1e-9), seed
        proven += found.proven
    assert solved >= 22
    assert proven == solved


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


def test_memory_parts_what_is_joined_for_time() -> None:
    problem = tight_problem()
    solution = solve(problem)
    assert solution is not None and solution.optimality.proven
    assert solution.stage_of == (0, 0, 0, 1, 1)
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
    solution = solve(problem)
    assert solution is not None
    assert follows_rules(problem, np.array(solution.stage_of))
    found = solution.optimality
    whole = best_intervals(problem, np.arange(problem.num_units), np.inf)
    assert whole is not None
    assert found.value <= stage_loads(problem, whole).max() * (1 + 1e-9)
    assert found.lower_bound <= found.value <= 1.2 * found.lower_bound
