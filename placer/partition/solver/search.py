"""Finds a first answer to a partition problem, and proves how good it is, by programs over downsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.conditions import BoundaryConditions, find_sides
from placer.partition.solver.families import beam_rows, chain_rows, distinct
from placer.partition.solver.lattice import (
    Lattice,
    Words,
    build_lattice,
    topological_order,
    unpack,
)
from placer.partition.solver.problem import (
    PartitionProblem,
    is_within_budgets,
    largest_load,
    load_above_all,
    simple_bound,
)
from placer.partition.solver.program import Boundaries, Family, best_boundaries
from placer.partition.solver.surviving import surviving_rows
from placer.partition.solver.work import Work

StageOf = NDArray[np.int64]

_WIDTH = 8  # of the beam; 16 finds nothing better on the graphs of benchmarks/msr
# The width for so many units or more: 1% worse on random graphs, in a third of the time.
_NARROW, _MANY = 4, 600
_FEW = 10  # the first attempt gets a tenth of the downsets, which suffices for most problems
_FIRST_SHARE = 1 / 16  # of the gap between bound and value
_MOST_FAILED = 3  # attempts with too many downsets, besides the first
_MOST_BITS = 20_000_000  # of all downsets together, to limit their memory
_TOLERANCE = 1e-10
_FACTORS = (1.2, 1.6, 3.0)  # limits to try for a first answer, as multiples of the simple bound


def is_reached(value: float, bound: float) -> bool:
    """Whether ``value`` is equal to the lower bound ``bound``, except for rounding."""
    return value <= bound * (1 + _TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The best placement below a limit, if any was found, and a lower bound on all placements.

    If ``finished``, the bound is the placement's load, or the limit if no placement is below it.
    """

    stage_of: StageOf | None
    bound: float
    finished: bool


class DownsetSearch:
    """Answers for the problem of ``lattice`` by dynamic programs over downsets.

    ``bound`` is a lower bound on all placements, which `prove` raises.
    """

    def __init__(self, lattice: Lattice) -> None:
        self.lattice, self.problem = lattice, lattice.problem
        self.bound = simple_bound(self.problem)
        self._sides = find_sides(lattice)

    def conditions(self, bound: float) -> BoundaryConditions:
        """Conditions for the boundaries of placements with all loads below ``bound``."""
        return BoundaryConditions(self.lattice, self._sides, bound)

    def family(self, rows: Words) -> Family:
        """The downsets ``rows``, ready for the dynamic program."""
        return Family(self.lattice, rows)

    def stages(self, boundaries: Boundaries) -> StageOf:
        """The stage of every unit, which is the first whose downset has it."""
        held = unpack(np.stack(boundaries.rows), self.lattice.num_units)
        stage_of = np.full(self.problem.num_units, -1, dtype=np.int64)
        stage_of[self.lattice.order] = np.argmax(held, axis=0)
        return stage_of

    def best_boundaries(
        self, rows: Words, bound: float, work: Work | None = None
    ) -> Boundaries | None:
        """`placer.partition.solver.program.best_boundaries` for the family ``rows``."""
        return best_boundaries(self.family(rows), self.conditions(bound), bound, work)

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
        boundaries = None
        for limit in limits:
            boundaries = boundaries or self.best_boundaries(rows, limit)
        if boundaries is None:
            return best, value
        stage_of = self.stages(boundaries)
        reached = largest_load(self.problem, stage_of)
        if reached < value and is_within_budgets(self.problem, stage_of):
            return stage_of, reached
        return best, value

    def best_within(self, rows: Words, limit: float, work: Work) -> Answer:
        """The best placement below ``limit`` with its boundaries among ``rows``."""
        boundaries = self.best_boundaries(rows, limit, work)
        if boundaries is None:
            spent = work.is_spent()
            return Answer(stage_of=None, bound=0.0 if spent else limit, finished=not spent)
        return Answer(stage_of=self.stages(boundaries), bound=boundaries.value, finished=True)

    def prove(self, value: float, most_alive: int, work: Work) -> StageOf | None:
        """Raise ``bound``, and return the best placement if one below ``value`` was found.

        All placements below a limit have boundaries that satisfy its conditions, and the number of such
        downsets grows exponentially with the limit. So first ``value`` is tried as the limit, with few
        downsets. Then limits are tried upwards from ``bound``; the first limit
        with a placement below it gives the best one. If there are too many downsets, limits between that
        one and the last without a placement are tried, as long as there is ``work`` left.
        """
        least = self.bound
        if is_reached(value, least) or not most_alive:
            return None
        if not np.isfinite(value):
            value = load_above_all(self.problem)
        left = min(most_alive, _MOST_BITS // max(1, self.lattice.num_units))
        # Shares of the gap: up to ``empty`` there is no placement, from ``full`` on too many downsets.
        empty, full = 0.0, np.inf
        share, most, failed = 1.0, left // _FEW, 0
        while failed <= _MOST_FAILED and left > 0 and not work.is_spent():
            limit = (least + share * (value - least)) * (1 - _TOLERANCE)
            rows = surviving_rows(self.conditions(limit), most=most, work=work)
            if rows is None:
                failed += 1
                full = share if failed > 1 else np.inf
                most = left if failed == 1 else most // 2
            else:
                answer = self.best_within(rows, limit, work)
                if answer.stage_of is not None or not answer.finished:
                    known = max(least, answer.bound, least + empty * (value - least))
                    self.bound = known * (1 if answer.finished else 1 - _TOLERANCE)
                    return answer.stage_of
                if share == 1.0:
                    self.bound = value
                    return None
                empty, left = share, left - len(rows)
                most = min(most, left)
            share = (empty + full) / 2 if full <= 1 else min(1.0, max(_FIRST_SHARE, 4 * empty))
        self.bound = (least + empty * (value - least)) * (1 - _TOLERANCE)
        return None


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
