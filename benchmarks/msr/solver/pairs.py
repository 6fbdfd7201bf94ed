"""Downsets with what isolated units cost, and the pairs of them that a stage may lie between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.msr.solver.conditions import PartialConditions
from benchmarks.msr.solver.costs import IsolatedCosts
from benchmarks.msr.solver.lattice import PartialLattice
from placer.partition.solver.lattice import Words, unpack
from placer.partition.solver.problem import Vector
from placer.partition.solver.program import Family, Stages, open_rows, stage_limits
from placer.partition.solver.work import Work

_ISOLATED = 3.0  # nanoseconds for what a group of isolated units costs a stage


class PartialFamily(Family):
    """Downsets of the other units; loads are with what isolated units cost at least."""

    def __init__(self, lattice: PartialLattice, rows: Words, crossing_nbytes: Vector) -> None:
        """``crossing_nbytes`` are those of `PartialConditions`."""
        super().__init__(lattice, rows)
        crossing = (self.counts > 0) & (self.counts < self.sizes)
        paid = lattice.num_paid
        self.boundary_crossing = crossing @ crossing_nbytes
        self.counts, self.sizes = self.counts[:, :paid], self.sizes[:paid]
        self.nbytes = lattice.value_nbytes[:paid]
        self.crossing = crossing[:, :paid] @ self.nbytes
        self.isolated = IsolatedCosts(lattice, unpack(rows, lattice.num_units))

    def whole_load(
        self,
        before: NDArray[np.int64],
        after: NDArray[np.int64],
        load: Vector,
        stage: int,
        work: Work,
    ) -> Vector:
        """The load with what all isolated units cost at least."""
        if not len(before) or not self.isolated.groups:
            return load
        work.take(_ISOLATED * len(self.isolated.groups) * len(before))
        found: Vector = load + self.isolated.least(before, after, stage)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePairs:
    """What a stage may be: it begins after row ``before[i]``, ends with ``after[i]``, has ``load[i]``.

    The load is without isolated units, or with what these cost at least.
    """

    before: NDArray[np.int32]
    after: NDArray[np.int32]
    load: Vector


def stage_pairs(
    family: PartialFamily, conditions: PartialConditions, bound: float, work: Work
) -> list[StagePairs] | None:
    """For each stage the pairs of rows that it may lie between, its load below ``bound``.

    Empty stages too, where these may be. Loads are with what isolated units cost at least. None where
    ``work`` did not suffice.
    """
    lattice, rows, opens = family.lattice, family.rows, open_rows(family, conditions)
    ends = [np.arange(len(rows)) == 0, *opens]
    alive = np.flatnonzero(np.any(ends, axis=0))
    known: dict[tuple[object, ...], StagePairs] = {}
    found = []
    for q, slot in enumerate(lattice.problem.slots):
        limits = stage_limits(family, slot)
        key = slot.seconds.tobytes(), slot.seconds_per_byte, *((id(s), most) for s, most in limits)
        if key not in known:
            nested = Stages(family, alive, None, q, bound, work).from_rows(alive)
            if work.is_spent():
                return None
            parts = [(p.before, p.after, p.load) for p in nested]
            if lattice.problem.may_be_empty:
                parts.append((alive, alive, np.zeros(len(alive))))
            before, after, load = (np.concatenate(column) for column in zip(*parts, strict=True))
            known[key] = StagePairs(
                before=before.astype(np.int32), after=after.astype(np.int32), load=load
            )
        pairs = known[key]
        may = ends[q][pairs.before] & ends[q + 1][pairs.after]
        found.append(
            StagePairs(before=pairs.before[may], after=pairs.after[may], load=pairs.load[may])
        )
    return found
