"""Partition problems that several tests solve."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from placer.partition import PartitionProblem, SharedValue, StageSlot, stage_loads


def tight_problem(budget: float = 4.0) -> PartitionProblem:
    """Unit 2 is fastest on the stage of its reader 3; with a budget of 4 it fits only on an earlier stage."""
    slot = StageSlot(
        device="d",
        seconds=np.array([0.0, 5.0, 0.0, 5.0, 1.0]),
        seconds_per_byte=1.0,
        nbytes=np.array([1.0, 1.0, 2.0, 3.0, 0.0]),
        budget=budget,
    )
    edges = ((0, 1), (1, 3), (2, 3), (3, 4))
    return PartitionProblem(
        num_units=5,
        edges=edges,
        values=tuple(SharedValue(nbytes=1.0, units=edge) for edge in edges),
        slots=(slot,) * 2,
    )


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
