"""The dynamic program over downsets with a limit on its work, which first rules out some of them."""

from __future__ import annotations

import numpy as np

from benchmarks.msr.proof.work import OutOfWork, Work
from placer.partition.solver.lattice import Flags, Lattice, Words
from placer.partition.solver.problem import Vector
from placer.partition.solver.program import (
    Boundaries,
    Family,
    Indices,
    Stages,
    best_boundaries,
)

_FIRST = 4  # a quarter of the work is for the program over all rows, before rows are ruled out
# Nanoseconds to compare two rows, to compute a load, and to use a stage.
_PAIR, _LOAD, _STAGE = 4.0, 30.0, 30.0


class CountedFamily(Family):
    """A family whose work is counted; what it computes raises ``OutOfWork`` when none is left."""

    def __init__(self, lattice: Lattice, rows: Words) -> None:
        super().__init__(lattice, rows)
        self.work = Work()

    def may_part(self, before: Indices, after: Indices) -> Flags:
        self._take(_PAIR * len(before) * len(after))
        return super().may_part(before, after)

    def stages_below(
        self, bound: float, before: Indices, after: Indices, may: Flags, stage: int
    ) -> tuple[Indices, Indices, Vector]:
        self._take(_LOAD * int(may.any(axis=0).sum()) * len(after))
        found = super().stages_below(bound, before, after, may, stage)
        self._take(_STAGE * len(self.lattice.problem.slots) * len(found[0]))
        return found

    def _take(self, nanoseconds: float) -> None:
        self.work.take(nanoseconds)
        if self.work.is_spent():
            raise OutOfWork


def best_within_work(family: CountedFamily, bound: float, work: Work) -> Boundaries | None:
    """`best_boundaries` of ``family``. Raises ``OutOfWork`` when it takes more than ``work``."""
    opens = family.may_end(bound)
    family.work = first = Work(work.left / _FIRST)
    try:
        return best_boundaries(family, bound, opens)
    except OutOfWork:
        pass
    finally:
        work.take(work.left / _FIRST - max(first.left, 0.0) if np.isfinite(work.left) else 0.0)
    family.work = work
    narrowed = _narrow(family, opens, bound)
    return None if narrowed is None else best_boundaries(family, bound, narrowed)


def _narrow(family: Family, opens: list[Flags], bound: float) -> list[Flags] | None:
    """``opens`` without rows at which no stage below the bound can begin or end; None if none is left.

    Each stage is examined once, those with the fewest pairs of rows first, because few rows for one
    boundary leave few rows for its neighbours.
    """
    slots = family.lattice.problem.slots
    rows = [np.zeros(1, dtype=np.int64), *map(np.flatnonzero, opens)]
    spare = int(np.any(opens, axis=0).sum()) ** 2 / 8
    todo = set(range(len(slots)))
    while todo:
        q = min(todo, key=lambda q: (len(rows[q]) * len(rows[q + 1]), q))
        size = len(rows[q]) * len(rows[q + 1])
        if not size:
            return None
        spare -= size
        if spare < 0:
            break
        todo.remove(q)
        kept = np.zeros((2, len(family.rows)), dtype=bool)
        for pairs in Stages(family, rows[q + 1], None, q, bound).from_rows(rows[q]):
            kept[0, pairs.before] = kept[1, pairs.after] = True
        rows[q], rows[q + 1] = rows[q][kept[0, rows[q]]], rows[q + 1][kept[1, rows[q + 1]]]
    found = []
    for left in rows[1:]:
        found.append(np.zeros(len(family.rows), dtype=bool))
        found[-1][left] = True
    return found
