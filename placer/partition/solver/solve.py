"""Solves a partition problem: finds a placement with a small largest load."""

from __future__ import annotations

import numpy as np

from placer.partition.solver.interval import best_intervals
from placer.partition.solver.lattice import topological_order
from placer.partition.solver.problem import PartitionProblem, largest_load, load_above_all
from placer.partition.solver.search import (
    DownsetSearch,
    StageOf,
    adjacency,
    newest_first,
    whole_lattice,
)

LARGE = 1500  # units; in larger problems stages are intervals of one order


def solve(problem: PartitionProblem) -> StageOf | None:
    """The stage of every unit in a placement with a small largest load; None if none within the budgets.

    A deterministic heuristic: the best placement whose boundaries are downsets of a few orders and a beam
    search. With more than 1,500 units, stages are intervals of one order.
    """
    if problem.num_units > LARGE:
        return _solve_large(problem)
    return DownsetSearch(whole_lattice(problem)).first_answer()


def _solve_large(problem: PartitionProblem) -> StageOf | None:
    """The best intervals along a few orders."""
    preds, succs = adjacency(problem)
    orders = [
        topological_order(preds, succs, range(problem.num_units)),
        newest_first(preds, succs),
        newest_first(succs, preds)[::-1],
    ]
    best, value = None, load_above_all(problem)
    for order in orders:
        found = best_intervals(problem, np.array(order, dtype=np.int64), value)
        if found is not None:
            best, value = found, largest_load(problem, found)
    return best
