"""Solves a partition problem: finds a placement with a small largest load, and a lower bound on it."""

from __future__ import annotations

import numpy as np

from placer.partition.solver.interval import best_intervals
from placer.partition.solver.lattice import topological_order
from placer.partition.solver.problem import (
    PartitionProblem,
    Solution,
    largest_load,
    load_above_all,
    simple_bound,
)
from placer.partition.solver.search import (
    DownsetSearch,
    StageOf,
    adjacency,
    newest_first,
    whole_lattice,
)
from placer.partition.solver.work import Work
from placer.plan.types import Optimality

MOST_ALIVE = 150_000  # partly decided downsets at a time in a proof; takes about a second
LARGE = 1500  # units; in larger problems stages are intervals of one order
_WORK, _LEAST_WORK = 7e3, 3e8  # nanoseconds for all proofs of a problem: per downset, and the least


def solve(problem: PartitionProblem, *, most_alive: int = MOST_ALIVE) -> Solution | None:
    """A placement with a small largest load, and a lower bound on the largest load of any placement.

    A first answer comes from the downsets of a few orders and a beam search. Then all downsets that a
    better placement could have are enumerated, and the result is optimal (`Optimality.proven`), unless
    there are more than ``most_alive`` partly decided downsets at a time or it takes too much work. With
    more than 1,500 units, stages are intervals of one order and nothing is proven. Deterministic. None if
    no placement within the budgets was found.
    """
    if problem.num_units > LARGE:
        return _solve_large(problem)
    search = DownsetSearch(whole_lattice(problem))
    first = search.first_answer()
    value = np.inf if first is None else largest_load(problem, first)
    better = search.prove(value, most_alive, proof_work(most_alive))
    stage_of = first if better is None else better
    return None if stage_of is None else as_solution(problem, stage_of, search.bound)


def proof_work(most_alive: int) -> Work:
    """The work that all proofs of one problem may take together."""
    return Work(max(_LEAST_WORK, _WORK * most_alive))


def as_solution(problem: PartitionProblem, stage_of: StageOf, bound: float) -> Solution:
    """``stage_of`` with its largest load and the lower bound ``bound``."""
    value = largest_load(problem, stage_of)
    return Solution(
        stage_of=tuple(stage_of.tolist()),
        optimality=Optimality(
            criterion="largest stage load", value=value, lower_bound=min(bound, value)
        ),
    )


def _solve_large(problem: PartitionProblem) -> Solution | None:
    """The best intervals along a few orders; the lower bound is `simple_bound`."""
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
    return None if best is None else as_solution(problem, best, simple_bound(problem))
