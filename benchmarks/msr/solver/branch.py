"""Units without edges put on stages by branch and bound, over a family of downsets of the others.

The dynamic program over downsets lets every stage have each isolated unit (`lattice.IsolatedUnit`),
or not, as is cheapest for that stage: a lower bound. A node of the search fixes the stages of some
of them; its bound is that of the program with what these cost there, and their bytes. Where the
isolated units of its best boundaries can be put on stages at no more than the bound, the node is
settled; else the one whose stage raises the load along these boundaries the most is fixed, on each
stage in turn.
(Land and Doig, "An automatic method of solving discrete programming problems", Econometrica 1960.)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.msr.proof.search import Answer
from benchmarks.msr.proof.work import Work
from benchmarks.msr.solver.assign import assign_isolated
from benchmarks.msr.solver.lattice import PartialLattice
from benchmarks.msr.solver.pairs import PartialFamily, StagePairs, stage_pairs
from placer.partition.solver.lattice import BitSums, Words, unpack
from placer.partition.solver.problem import Vector, stage_loads

Indices = NDArray[np.int64]

_TOLERANCE = 1e-10
_MOST_STORED = 10_000_000  # stages in open nodes, for the memory they take
_REACHED = 40.0  # nanoseconds for a stage in the programs of a node
_NODE, _ISOLATED = 4e5, 4e4  # for a node, and for an isolated unit whose stage is looked for there
_SEARCHED, _SEARCH = (
    8,
    2e5,
)  # every eighth node that a first try did not settle; for each isolated unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Node:
    """Isolated units that are fixed, and for each stage what it may be then."""

    fixed: Mapping[int, int]
    stages: Sequence[StagePairs]

    @property
    def size(self) -> int:
        """Stages that it keeps; all but one of its lists are its siblings', too."""
        return sum(len(pairs.load) for pairs in self.stages) // len(self.stages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Put:
    """A stage for an isolated unit: the loads of all stages then, and what these rise by."""

    stage: int
    loads: Vector
    rise: float  # of the largest; infinite where its bytes fit nowhere
    extra: float  # of the sum


def branch_isolated(lattice: PartialLattice, rows: Words, limit: float, work: Work) -> Answer:
    """The placement of least largest load below ``limit`` with its boundaries among ``rows``.

    Exact where ``work`` suffices: isolated units, what they share with each other, and budgets count.
    Exponential in the isolated units that want to be on several stages. The node of least bound is first;
    ties go to the one with more isolated units fixed, then to the older.
    """
    family = PartialFamily(lattice, rows)
    stages = stage_pairs(family, limit, work)
    if stages is None:
        return Answer(stage_of=None, bound=0.0, finished=False)
    return _Search(family, stages, limit, work).run()


class _Search:
    def __init__(
        self,
        family: PartialFamily,
        stages: list[StagePairs],
        limit: float,
        work: Work,
    ) -> None:
        lattice, rows = family.lattice, family.rows
        self._lattice, self._problem, self._rows = lattice, lattice.problem, rows
        self._costs, self._limit, self._work = family.isolated, limit, work
        self._held = [
            BitSums(s.nbytes[lattice.order][:, None])(rows)[:, 0] for s in self._problem.slots
        ]
        self._budgets = [
            np.inf if s.budget is None else s.budget * (1 + 1e-12) for s in self._problem.slots
        ]
        self._bytes = np.array([s.nbytes for s in self._problem.slots])
        self._best: Indices | None = None
        self._first: Indices | None = None  # within the budgets or not
        self._settled = 0
        self._heap: list[tuple[float, int, int, _Node]] = []
        self._stored = self._count = 0
        self._push(_Node(fixed={}, stages=stages), self._bound(stages))

    def run(self) -> Answer:
        while self._heap:
            bound, _, _, node = self._heap[0]
            if bound >= self._limit:
                break
            if self._work.is_spent() or self._stored > _MOST_STORED:
                found = self._first if self._best is None else self._best
                return Answer(stage_of=found, bound=bound, finished=False)
            heapq.heappop(self._heap)
            self._stored -= node.size
            self._settle(node, bound)
        return Answer(stage_of=self._best, bound=self._limit, finished=True)

    def _push(self, node: _Node, bound: float) -> None:
        if bound < self._limit:
            heapq.heappush(self._heap, (bound, -len(node.fixed), self._count, node))
            self._count += 1
            self._stored += node.size

    def _settle(self, node: _Node, bound: float) -> None:
        """Place the isolated units of the node's best boundaries; push its children if they cost more."""
        self._work.take(_NODE)
        ahead, behind = _forward(node.stages, len(self._rows)), self._backward(node.stages)
        stages = []
        for q, pairs in enumerate(node.stages):
            reached = np.maximum(ahead[q][pairs.before], behind[q + 1][pairs.after])
            stages.append(_some(pairs, np.maximum(reached, pairs.load) < self._limit))
        near = [self._near(s, ahead[q], behind[q + 1], bound) for q, s in enumerate(stages)]
        path = _least_sum(near, len(self._rows))
        free = [f for f in self._costs.group_of if f not in node.fixed]
        unit, assigned = self._assign(path, free, node.fixed)
        if assigned is not None:
            self._best, self._limit = self._placed(path, assigned[0]), assigned[1]
        elif self._settled % _SEARCHED == 0:
            self._work.take(_SEARCH * len(free))
            self._offer(assign_isolated(self._problem, self._placed(path, node.fixed)))
        self._settled += 1
        self._work.take(_ISOLATED * len(free) + _REACHED * node.size * len(node.stages))
        if unit is not None and self._limit > bound * (1 + _TOLERANCE):
            self._branch(node, stages, unit)

    def _offer(self, stage_of: Indices) -> None:
        self._first = stage_of if self._first is None else self._first
        loads = stage_loads(self._problem, stage_of)
        held = np.array([s.nbytes[stage_of == q].sum() for q, s in enumerate(self._problem.slots)])
        if (held <= self._budgets).all() and loads.max() < self._limit:
            self._best, self._limit = stage_of, float(loads.max())

    def _near(self, pairs: StagePairs, ahead: Vector, behind: Vector, bound: float) -> StagePairs:
        reached = np.maximum(np.maximum(ahead[pairs.before], behind[pairs.after]), pairs.load)
        return _some(pairs, reached <= bound * (1 + _TOLERANCE))

    def _branch(self, node: _Node, stages: Sequence[StagePairs], unit: int) -> None:
        """A child for each stage that may have ``unit``; it has the stages of its siblings else."""
        group = self._costs.group_of[unit]
        away, here = [], []
        for q, pairs in enumerate(stages):
            slot = self._problem.slots[q]

            def cost(fixed: Mapping[int, int], pairs: StagePairs = pairs, q: int = q) -> Vector:
                return self._costs.cost(group, pairs.before, pairs.after, q, fixed)

            rest = pairs.load - cost(node.fixed)
            away.append(self._below(pairs, rest + cost({**node.fixed, unit: -1})))
            nbytes = self._held[q][pairs.after] - self._held[q][pairs.before]
            nbytes = nbytes + sum(slot.nbytes[f] for f, at in node.fixed.items() if at == q)
            fits = nbytes + slot.nbytes[unit] <= self._budgets[q]
            here.append(self._below(pairs, rest + cost({**node.fixed, unit: q}), fits))
            self._work.take(_REACHED * len(pairs.load))
        ahead, behind = _forward(away, len(self._rows)), self._backward(away)
        for q, pairs in enumerate(here):
            if not len(pairs.load):
                continue
            reached = np.maximum(ahead[q][pairs.before], behind[q + 1][pairs.after])
            bound = float(np.maximum(reached, pairs.load).min())
            fixed = {**node.fixed, unit: q}
            self._push(_Node(fixed=fixed, stages=(*away[:q], pairs, *away[q + 1 :])), bound)

    def _below(
        self, pairs: StagePairs, load: Vector, may: NDArray[np.bool_] | bool = True
    ) -> StagePairs:
        return _some(
            StagePairs(before=pairs.before, after=pairs.after, load=load),
            may & (load < self._limit),
        )

    def _assign(
        self, path: StagePairs, free: Sequence[int], fixed: Mapping[int, int]
    ) -> tuple[int | None, tuple[dict[int, int], float] | None]:
        """The isolated unit to branch on; stages for all, if the largest load is below the limit.

        Each has a stage that raises the largest load along ``path`` the least, then the sum of
        loads; that of the one that is to be branched on does so the most.
        """
        ends = zip(self._held, path.before, path.after, strict=True)
        held = np.array([h[b] - h[a] for h, a, b in ends])
        for f, q in fixed.items():
            held[q] += self._bytes[q, f]
        ranks: list[tuple[float, float, float, int]] = []
        for f in free:
            put = self._stage(path, path.load, held, fixed, f)
            ranks.append((put.rise, put.extra, float(self._bytes[:, f].max()), -f))
        ranks.sort(reverse=True)
        worst = -ranks[0][-1] if ranks else None
        placed, loads = dict(fixed), path.load
        for f in (-rank[-1] for rank in ranks):
            put = self._stage(path, loads, held, placed, f)
            if put.rise == np.inf or put.loads.max() >= self._limit:
                return worst, None
            placed[f], loads = put.stage, put.loads
            held[put.stage] += self._bytes[put.stage, f]
        largest = float(loads.max())
        return worst, (placed, largest) if largest < self._limit else None

    def _stage(
        self, path: StagePairs, loads: Vector, held: Vector, fixed: Mapping[int, int], unit: int
    ) -> _Put:
        """The best stage on ``path`` for ``unit`` among those that its bytes fit on."""
        group = self._costs.group_of[unit]
        now, away, here = self._costs.along(group, path.before, path.after, fixed, unit)
        table = np.repeat((loads - now + away)[None], len(loads), axis=0)  # [q]: it is on q
        np.fill_diagonal(table, loads - now + here)
        largest, total = table.max(axis=1), table.sum(axis=1)
        largest[held + self._bytes[:, unit] > self._budgets] = np.inf
        q = int(np.lexsort((total, largest))[0])
        fits = largest[q] < np.inf
        return _Put(
            stage=q,
            loads=table[q],
            rise=max(0.0, float(largest[q] - loads.max())),
            extra=float(total[q] - loads.sum()) if fits else np.inf,
        )

    def _placed(self, path: StagePairs, fixed: Mapping[int, int]) -> Indices:
        lattice = self._lattice
        held = unpack(self._rows[path.after], lattice.num_units)
        stage_of = np.full(self._problem.num_units, -1, dtype=np.int64)
        stage_of[lattice.order] = np.argmax(held, axis=0)
        for f, q in fixed.items():
            stage_of[f] = q
        return stage_of

    def _bound(self, stages: Sequence[StagePairs]) -> float:
        return float(_forward(stages, len(self._rows))[-1][-1])

    def _backward(self, stages: Sequence[StagePairs]) -> list[Vector]:
        """What the rest costs at least from each row on, before each stage and after the last."""
        least = np.full(len(self._rows), np.inf)
        least[-1] = 0.0
        found = [least]
        for pairs in reversed(stages):
            least = np.full(len(self._rows), np.inf)
            np.minimum.at(least, pairs.before, np.maximum(pairs.load, found[-1][pairs.after]))
            found.append(least)
        return found[::-1]


def _forward(stages: Sequence[StagePairs], num_rows: int) -> list[Vector]:
    """What it costs at least to come to each row, before each stage and after the last."""
    least = np.full(num_rows, np.inf)
    least[0] = 0.0
    found = [least]
    for pairs in stages:
        least = np.full(num_rows, np.inf)
        np.minimum.at(least, pairs.after, np.maximum(pairs.load, found[-1][pairs.before]))
        found.append(least)
    return found


def _some(pairs: StagePairs, which: NDArray[np.bool_]) -> StagePairs:
    return StagePairs(before=pairs.before[which], after=pairs.after[which], load=pairs.load[which])


def _least_sum(stages: Sequence[StagePairs], num_rows: int) -> StagePairs:
    """One pair for each stage, a chain from the empty row to the full one, of least sum of loads."""
    least = np.full(num_rows, np.inf)
    least[0] = 0.0
    sums = []
    for pairs in stages:
        sums.append(pairs.load + least[pairs.before])
        least = np.full(num_rows, np.inf)
        np.minimum.at(least, pairs.after, sums[-1])
    row, chosen = num_rows - 1, []
    for pairs, total in zip(reversed(stages), reversed(sums), strict=True):
        entering = np.flatnonzero(pairs.after == row)
        chosen.append(int(entering[np.argmin(total[entering])]))
        row = int(pairs.before[chosen[-1]])
    picked = list(zip(stages, reversed(chosen), strict=True))
    return StagePairs(
        before=np.array([p.before[i] for p, i in picked]),
        after=np.array([p.after[i] for p, i in picked]),
        load=np.array([p.load[i] for p, i in picked]),
    )
