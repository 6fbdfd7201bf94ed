"""What isolated units, and bytes that may wait elsewhere, add to the conditions on boundaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.msr.solver.folds import LooseSlot
from benchmarks.msr.solver.lattice import PartialLattice
from placer.partition.solver.conditions import BoundaryConditions
from placer.partition.solver.problem import StageSlot, Vector


class PartialConditions(BoundaryConditions):
    """The conditions with the least that isolated units cost either side of a boundary."""

    def __init__(self, lattice: PartialLattice, bound: float) -> None:
        self._isolated, self._num_paid = lattice.isolated, lattice.num_paid
        super().__init__(lattice, bound)

    def least_seconds(self, side: Sequence[StageSlot], *, first: bool) -> Vector:
        """A side with units that an isolated unit shares values with pays its seconds, or for a value.

        A boundary that parts these units costs the isolated unit's cheapest value: the rest of it is left in
        ``crossing_nbytes``.
        """
        seconds = super().least_seconds(side, first=first)
        factor = min(s.seconds_per_byte for s in side)
        for i, f in enumerate(self._isolated, self._num_paid):
            nbytes = float(self.lattice.value_nbytes[i])
            least = min(*(s.seconds[f.unit] for s in side), factor * nbytes)
            seconds[f.shared[0 if first else -1]] += least
            rest = nbytes - least / factor if factor else 0.0
            self.crossing_nbytes[i] = min(self.crossing_nbytes[i], rest)
        return seconds

    def least_bytes(self, side: Sequence[StageSlot], *, first: bool) -> Vector:
        """With the bytes that are on this side wherever they wait."""
        held = []
        for slot in side:
            nbytes = slot.nbytes
            if isinstance(slot, LooseSlot):
                nbytes = nbytes + (slot.earlier if first else slot.later)
            held.append(nbytes)
        found: Vector = np.min(held, axis=0)[self.lattice.order]
        return found
