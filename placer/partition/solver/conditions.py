"""Necessary conditions for a downset to be a boundary of a placement with all loads below a bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placer.partition.solver.lattice import Flags, Lattice
from placer.partition.solver.problem import StageSlot, Vector


class BoundaryConditions:
    """Which downsets can end stage q of a placement with all loads below a bound.

    If the units of a downset take w seconds, and the values that cross its boundary take c, then
    w + c <= q * bound, because some stage before the boundary pays for each crossing value. The same holds
    for the units outside and the stages after the boundary. The bytes on either side must be within the
    sum of its budgets, and no unit may be pinned to a device of the other side. If stages differ, the least
    cost of any stage on a side counts. The conditions are also necessary for partly decided downsets, with
    the units that are decided.

    ``crossing_nbytes`` are the bytes that each value adds to c. A subclass may lower them, and give
    tighter `least_seconds` and `least_bytes`.
    """

    def __init__(self, lattice: Lattice, bound: float) -> None:
        slots = lattice.problem.slots
        self.lattice = lattice
        self.crossing_nbytes = lattice.value_nbytes.copy()
        self.columns: list[Vector] = []  # weights of units that are summed
        self._keys: dict[bytes, int] = {}
        # Per q: column, seconds per byte, limit
        self.inside: list[list[tuple[int, float, float]]] = []
        self.outside: list[list[tuple[int, float, float]]] = []
        for q in range(1, len(slots)):
            for conditions, side in ((self.inside, slots[:q]), (self.outside, slots[q:])):
                first = conditions is self.inside
                factor = min(s.seconds_per_byte for s in side)
                seconds = self.least_seconds(side, first=first)
                entries = [(self._column(seconds), factor, len(side) * bound)]
                budgets = [s.budget for s in side if s.budget is not None]
                if len(budgets) == len(side):
                    nbytes = self.least_bytes(side, first=first)
                    total = float(sum(budgets))
                    if nbytes.sum() > total:
                        entries.append((self._column(nbytes), 0.0, total * (1 + 1e-12)))
                foreign = _foreign(lattice, {s.device for s in side})
                if foreign.any():
                    entries.append((self._column(foreign), 0.0, 0.5))
                conditions.append(entries)
        self._pairs = list(zip(self.inside, self.outside, strict=True))

    def least_seconds(self, side: Sequence[StageSlot], *, first: bool) -> Vector:
        """For each unit of the lattice, its least seconds on one side of a boundary (``first``: before)."""
        found: Vector = np.min([slot.seconds[self.lattice.order] for slot in side], axis=0)
        return found

    def least_bytes(self, side: Sequence[StageSlot], *, first: bool) -> Vector:
        """For each unit of the lattice, its least bytes on one side of a boundary (``first``: before)."""
        found: Vector = np.min([slot.nbytes[self.lattice.order] for slot in side], axis=0)
        return found

    def _column(self, weights: Vector) -> int:
        key = weights.tobytes()
        if key not in self._keys:
            self._keys[key] = len(self.columns)
            self.columns.append(weights)
        return self._keys[key]

    def open(self, q: int, inside: Vector, outside: Vector, crossing: Vector) -> Flags:
        """Whether downsets with these sums (a column for each of ``columns``) can end stage q >= 1."""
        first, second = self._pairs[q - 1]
        alive = np.ones(len(crossing), dtype=bool)
        for sums, entries in ((inside, first), (outside, second)):
            for column, factor, limit in entries:
                alive &= sums[:, column] + factor * crossing <= limit
        return alive

    def some(self, inside: Vector, outside: Vector, crossing: Vector) -> Flags:
        """Whether downsets with these sums can end any stage but the last."""
        alive = np.zeros(len(crossing), dtype=bool)
        for q in range(1, len(self._pairs) + 1):
            alive |= self.open(q, inside, outside, crossing)
        return alive


def _foreign(lattice: Lattice, devices: set[str]) -> Vector:
    pins = lattice.problem.pins
    return np.array([float(pins.get(int(u), None) not in {None, *devices}) for u in lattice.order])
