"""Necessary conditions for a downset to be a boundary of a placement with all loads below a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from placer.partition.solver.lattice import Flags, Lattice
from placer.partition.solver.problem import StageSlot, Vector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """The stages on one side of a boundary, and the least that each unit costs on any of them."""

    slots: tuple[StageSlot, ...]
    seconds: Vector
    nbytes: Vector

    @property
    def seconds_per_byte(self) -> float:
        return min(slot.seconds_per_byte for slot in self.slots)


def find_sides(lattice: Lattice) -> list[tuple[Side, Side]]:
    """The stages before and after the boundary at the end of each stage but the last."""
    slots = lattice.problem.slots

    def side(slots: tuple[StageSlot, ...]) -> Side:
        return Side(
            slots=slots,
            seconds=np.min([slot.seconds[lattice.order] for slot in slots], axis=0),
            nbytes=np.min([slot.nbytes[lattice.order] for slot in slots], axis=0),
        )

    return [(side(slots[:q]), side(slots[q:])) for q in range(1, len(slots))]


class BoundaryConditions:
    """Which downsets can end stage q of a placement with all loads below a bound.

    If the units of a downset take w seconds, and the values that cross its boundary take c, then
    w + c <= q * bound, because some stage before the boundary pays for each crossing value. The same holds
    for the units outside and the stages after the boundary. The bytes on either side must be within the
    sum of its budgets, and no unit may be pinned to a device of the other side. If stages differ, the least
    cost of any stage on a side counts. The conditions are also necessary for partly decided downsets, with
    the units that are decided.
    """

    def __init__(self, lattice: Lattice, sides: Sequence[tuple[Side, Side]], bound: float) -> None:
        """``sides`` are those of `find_sides`, or with more that a unit is known to cost."""
        self.lattice = lattice
        self.columns: list[Vector] = []  # weights of units that are summed
        self._keys: dict[bytes, int] = {}
        # Per q, for the units inside and for those outside: column, seconds per byte, limit
        self._pairs = [
            (self._entries(before, bound), self._entries(after, bound)) for before, after in sides
        ]

    def _entries(self, side: Side, bound: float) -> list[tuple[int, float, float]]:
        slots = side.slots
        entries = [(self._column(side.seconds), side.seconds_per_byte, len(slots) * bound)]
        budgets = [s.budget for s in slots if s.budget is not None]
        total = float(sum(budgets))
        if len(budgets) == len(slots) and side.nbytes.sum() > total:
            entries.append((self._column(side.nbytes), 0.0, total * (1 + 1e-12)))
        foreign = _foreign(self.lattice, {s.device for s in slots})
        if foreign.any():
            entries.append((self._column(foreign), 0.0, 0.5))
        return entries

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

    def open_rows(self, sums: Callable[[Vector], Vector], crossing: Vector) -> list[Flags]:
        """For each stage, whether each downset of a family may be the boundary at its end.

        ``sums(weights)`` are sums over the units of each downset; the last one must have all units.
        """
        count = len(crossing)
        inside = np.empty((count, len(self.columns)))  # no columns where there is one stage
        for c, weights in enumerate(self.columns):
            inside[:, c] = sums(weights)
        outside = np.array([w.sum() for w in self.columns]) - inside
        opens = [self.open(q, inside, outside, crossing) for q in range(1, len(self._pairs) + 1)]
        return [*opens, np.arange(count) == count - 1]


def _foreign(lattice: Lattice, devices: set[str]) -> Vector:
    pins = lattice.problem.pins
    return np.array([float(pins.get(int(u), None) not in {None, *devices}) for u in lattice.order])
