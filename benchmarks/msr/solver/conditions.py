"""What isolated units, and bytes that may wait elsewhere, add to the conditions on boundaries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.msr.proof.conditions import BoundaryConditions, Side, find_sides
from benchmarks.msr.solver.folds import LooseSlot
from benchmarks.msr.solver.lattice import PartialLattice, least_alone
from placer.partition.solver.problem import Vector


def partial_conditions(lattice: PartialLattice, bound: float) -> BoundaryConditions:
    """The conditions with the least that isolated units cost either side of a boundary."""
    return BoundaryConditions(lattice, partial_sides(lattice), bound)


def partial_sides(lattice: PartialLattice) -> list[tuple[Side, Side]]:
    """The sides of each boundary, with what isolated units cost there at least."""
    return [
        (_with_isolated(lattice, before, first=True), _with_isolated(lattice, after, first=False))
        for before, after in find_sides(lattice)
    ]


def _with_isolated(lattice: PartialLattice, side: Side, *, first: bool) -> Side:
    """A side with units that an isolated unit shares values with pays its seconds, or for a value.

    A boundary that parts these units costs the isolated unit's cheapest value: the rest of it is left in
    the lattice's ``value_nbytes``. Bytes include those that are on this side wherever they wait.
    """
    seconds = side.seconds.copy()
    for f in lattice.isolated:
        seconds[f.shared[0 if first else -1]] += least_alone(f, side.slots)
    held = []
    for slot in side.slots:
        nbytes = slot.nbytes
        if isinstance(slot, LooseSlot):
            nbytes = nbytes + (slot.earlier if first else slot.later)
        held.append(nbytes)
    nbytes_of: Vector = np.min(held, axis=0)[lattice.order]
    return replace(side, seconds=seconds, nbytes=nbytes_of)
