"""A smaller partition problem with the same answer: units on a cycle are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.problem import PartitionProblem, SharedValue, Vector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """A smaller problem, and the unit of it that each original unit is part of."""

    problem: PartitionProblem
    unit_of: NDArray[np.int64]


def join_cycles(problem: PartitionProblem) -> Reduction:
    """Units on a cycle become one, since they can only share a stage."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(problem.num_units))
    graph.add_edges_from(problem.edges)
    leader = list(range(problem.num_units))
    for component in nx.strongly_connected_components(graph):
        for unit in component:
            leader[unit] = min(component)
    return contract(problem, leader)


def contract(problem: PartitionProblem, leaders: Sequence[int]) -> Reduction:
    """The problem in which units with the same leader are one; leaders keep their relative order."""
    names, unit_of = np.unique(np.asarray(leaders, dtype=np.int64), return_inverse=True)
    count = len(names)
    edges = sorted(
        {(int(unit_of[a]), int(unit_of[b])) for a, b in problem.edges if unit_of[a] != unit_of[b]}
    )
    values = []
    for value in problem.values:
        units = tuple(sorted({int(unit_of[u]) for u in value.units}))
        if value.external or len(units) > 1:
            values.append(SharedValue(nbytes=value.nbytes, units=units, external=value.external))

    def sums(weights: Vector) -> Vector:
        return np.bincount(unit_of, weights=weights, minlength=count).astype(np.float64)

    slots = tuple(
        replace(slot, seconds=sums(slot.seconds), nbytes=sums(slot.nbytes))
        for slot in problem.slots
    )
    pins = {int(unit_of[u]): problem.pins[u] for u in sorted(problem.pins, reverse=True)}
    standalone = {int(unit_of[u]) for u in range(problem.num_units) if u not in problem.auxiliary}
    reduced = PartitionProblem(
        num_units=count,
        edges=tuple(edges),
        values=tuple(values),
        slots=slots,
        pins=pins,
        auxiliary=frozenset(range(count)) - standalone,
    )
    return Reduction(problem=reduced, unit_of=unit_of)
