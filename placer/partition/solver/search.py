"""Finds a placement for a partition problem, by programs over the downsets of a few orders and a beam."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.families import beam_rows, chain_rows, distinct
from placer.partition.solver.lattice import Lattice, Words, build_lattice, topological_order, unpack
from placer.partition.solver.problem import (
    PartitionProblem,
    is_within_budgets,
    largest_load,
    load_above_all,
    simple_bound,
)
from placer.partition.solver.program import Boundaries, Family, best_boundaries

StageOf = NDArray[np.int64]

_WIDTH = 8  # of the beam; 16 finds nothing better on the graphs of benchmarks/msr
# The width for so many units or more: 1% worse on random graphs, in a third of the time.
_NARROW, _MANY = 4, 600
_TOLERANCE = 1e-10
_FACTORS = (1.2, 1.6, 3.0)  # limits to try for a first answer, as multiples of the simple bound


class DownsetSearch:
    """Answers for the problem of ``lattice`` by dynamic programs over downsets."""

    def __init__(self, lattice: Lattice) -> None:
        self.lattice, self.problem = lattice, lattice.problem

    def family(self, rows: Words) -> Family:
        """The downsets ``rows``, ready for the dynamic program."""
        return Family(self.lattice, rows)

    def stages(self, boundaries: Boundaries) -> StageOf:
        """The stage of every unit, which is the first whose downset has it."""
        held = unpack(np.stack(boundaries.rows), self.lattice.num_units)
        stage_of = np.full(self.problem.num_units, -1, dtype=np.int64)
        stage_of[self.lattice.order] = np.argmax(held, axis=0)
        return stage_of

    def first_answer(self) -> StageOf | None:
        """The best placement with boundaries from a few orders and a beam search.

        A deterministic heuristic. None if no placement within the budgets is found.
        """
        best, value = None, np.inf
        for rows in self.first_families():
            best, value = self.improve(rows, best, value)
        return best

    def first_families(self) -> Iterator[Words]:
        """Downsets for a first answer: those of a few orders, then those of a beam search as well."""
        lattice = self.lattice
        orders = [np.arange(lattice.num_units), *_deep_orders(lattice)]
        chains = distinct(np.concatenate([chain_rows(lattice, order) for order in orders]))
        yield chains
        width = _WIDTH if self.problem.num_units < _MANY else _NARROW
        yield distinct(np.concatenate([chains, beam_rows(lattice, width)]))

    def improve(
        self, rows: Words, best: StageOf | None, value: float
    ) -> tuple[StageOf | None, float]:
        """The better of ``best`` (with load ``value``) and the best one with boundaries in ``rows``."""
        least, most = simple_bound(self.problem), load_above_all(self.problem)
        limits = [value * (1 - _TOLERANCE)]
        if not np.isfinite(value):  # low limits first: time grows with the limit
            limits = [*(factor * least for factor in _FACTORS if factor * least < most), most]
        family, boundaries = self.family(rows), None
        for limit in limits:
            boundaries = boundaries or best_boundaries(family, limit)
        if boundaries is None:
            return best, value
        stage_of = self.stages(boundaries)
        reached = largest_load(self.problem, stage_of)
        if reached < value and is_within_budgets(self.problem, stage_of):
            return stage_of, reached
        return best, value


def whole_lattice(problem: PartitionProblem) -> Lattice:
    """The lattice of all units of ``problem``, whose edges have no cycle, in a topological order."""
    order = topological_order(*adjacency(problem), range(problem.num_units))
    return build_lattice(problem, order)


def adjacency(problem: PartitionProblem) -> tuple[list[list[int]], list[list[int]]]:
    """For each unit its direct predecessors, and for each its direct successors."""
    preds: list[list[int]] = [[] for _ in range(problem.num_units)]
    succs: list[list[int]] = [[] for _ in range(problem.num_units)]
    for a, b in sorted(set(problem.edges)):
        preds[b].append(a)
        succs[a].append(b)
    return preds, succs


def _deep_orders(lattice: Lattice) -> list[NDArray[np.int64]]:
    """Depth-first orders from the front and from the back."""
    front = newest_first(lattice.preds, lattice.succs)
    back = newest_first(lattice.succs, lattice.preds)
    return [np.array(front, dtype=np.int64), np.array(back[::-1], dtype=np.int64)]


def newest_first(preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]]) -> list[int]:
    """A depth-first topological order: the unit that became ready last comes next."""
    missing = [len(p) for p in preds]
    ready = [u for u in reversed(range(len(preds))) if not missing[u]]
    order = []
    while ready:
        unit = ready.pop()
        order.append(unit)
        for reader in reversed(succs[unit]):
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return order
