"""Downsets with what isolated units cost, and the pairs of them that a stage may lie between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.msr.proof.program import CountedFamily
from benchmarks.msr.proof.work import OutOfWork, Work
from benchmarks.msr.solver.conditions import partial_conditions
from benchmarks.msr.solver.costs import IsolatedCosts
from benchmarks.msr.solver.lattice import PartialLattice
from placer.partition.solver.lattice import Flags, Words, unpack
from placer.partition.solver.problem import Vector
from placer.partition.solver.program import Indices, Stages, stage_limits

_ISOLATED = 3.0  # nanoseconds for what a group of isolated units costs a stage


class PartialFamily(CountedFamily):
    """Downsets of the other units; loads are with what isolated units cost at least. Stages may be empty."""

    lattice: PartialLattice

    def __init__(self, lattice: PartialLattice, rows: Words) -> None:
        super().__init__(lattice, rows)
        self._all_crossing = self.crossing
        paid = lattice.num_paid
        self.counts, self.sizes = self.counts[:, :paid], self.sizes[:paid]
        self.nbytes = lattice.value_nbytes[:paid]
        self.crossing = ((self.counts > 0) & (self.counts < self.sizes)) @ self.nbytes
        self.isolated = IsolatedCosts(lattice, unpack(rows, lattice.num_units))

    def may_end(self, bound: float) -> list[Flags]:
        """By all conditions, with the values of isolated units, which cross boundaries."""
        conditions = partial_conditions(self.lattice, bound)
        return conditions.open_rows(self.sums, self._all_crossing)

    def may_part(self, before: Indices, after: Indices) -> Flags:
        """An empty stage, too."""
        found: Flags = super().may_part(before, after) | (after[:, None] == before[None, :])
        return found

    def stages_below(
        self, bound: float, before: Indices, after: Indices, may: Flags, stage: int
    ) -> tuple[Indices, Indices, Vector]:
        """With what all isolated units cost at least."""
        before, after, load = super().stages_below(bound, before, after, may, stage)
        if not len(before) or not self.isolated.groups:
            return before, after, load
        self.work.take(_ISOLATED * len(self.isolated.groups) * len(before))
        whole = load + self.isolated.least(before, after, stage)
        near = whole < bound
        return before[near], after[near], whole[near]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePairs:
    """What a stage may be: it begins after row ``before[i]``, ends with ``after[i]``, has ``load[i]``.

    The load is without isolated units, or with what these cost at least.
    """

    before: NDArray[np.int32]
    after: NDArray[np.int32]
    load: Vector


def stage_pairs(family: PartialFamily, bound: float, work: Work) -> list[StagePairs] | None:
    """For each stage the pairs of rows that it may lie between, its load below ``bound``.

    Empty stages, too. Loads are with what isolated units cost at least. None where
    ``work`` did not suffice.
    """
    lattice, rows, opens = family.lattice, family.rows, family.may_end(bound)
    family.work = work
    ends = [np.arange(len(rows)) == 0, *opens]
    alive = np.flatnonzero(np.any(ends, axis=0))
    known: dict[tuple[object, ...], StagePairs] = {}
    found = []
    for q, slot in enumerate(lattice.problem.slots):
        limits = stage_limits(family, slot)
        key = slot.seconds.tobytes(), slot.seconds_per_byte, *((id(s), most) for s, most in limits)
        if key not in known:
            try:
                nested = Stages(family, alive, None, q, bound).from_rows(alive)
            except OutOfWork:
                return None
            parts = [(p.before, p.after, p.load) for p in nested]
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
