"""Finds the best placement whose boundaries are in a family of downsets, by dynamic programming.

With f(D, q) the least possible largest load of the first q stages, which have downset D together,

    f(D, q) = min over E in the family, E a subset of D, of max(f(E, q - 1), load(q, D - E))

The result is optimal among the placements whose boundaries are in the family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.lattice import BitSums, Flags, Lattice, Words, unpack
from placer.partition.solver.problem import StageSlot, Vector

Indices = NDArray[np.int64]

_BLOCK = 64  # downsets whose stages are examined together


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """A placement as the downset at the end of each stage, with its largest load."""

    rows: tuple[NDArray[np.uint64], ...]
    value: float


def _counts(flags: NDArray[np.uint8], groups: Sequence[Sequence[int]]) -> NDArray[np.int16]:
    """The number of units of each group in every row."""
    counts = np.empty((len(flags), len(groups)), dtype=np.int16)
    for g, units in enumerate(groups):
        counts[:, g] = flags[:, list(units)].sum(axis=1)
    return counts


class Family:
    """Downsets sorted by size, with the sums from which the loads of stages are computed.

    ``crossing[i]`` is the number of bytes that cross the boundary of row i.
    """

    def __init__(self, lattice: Lattice, rows: Words) -> None:
        self.lattice, self.rows = lattice, rows
        n = lattice.num_units
        flags = unpack(rows, n)
        self.standalone = flags[:, lattice.standalone].sum(axis=1, dtype=np.int64)
        self.counts = _counts(flags, lattice.values)
        self.sizes = np.array([len(v) for v in lattice.values], dtype=np.int16)
        self.nbytes = lattice.value_nbytes
        self.crossing = ((self.counts > 0) & (self.counts < self.sizes)) @ self.nbytes
        self.outer = _counts(flags, lattice.external)
        self._sums: dict[bytes, Vector] = {}

    def sums(self, weights: Vector) -> Vector:
        key = weights.tobytes()
        if key not in self._sums:
            self._sums[key] = BitSums(weights[:, None])(self.rows)[:, 0]
        return self._sums[key]

    def loads(self, before: Indices, after: Indices, slot: StageSlot) -> Vector:
        """``[i, j]``: the load on ``slot`` of the stage ``after[i] - before[j]``, if these nest.

        A stage pays for the values that cross either of its boundaries. For a value that crosses both, one
        payment is subtracted; both are if the stage has none of the value's units, that is, if both rows
        have the same number of them.
        """
        lattice = self.lattice
        seconds = self.sums(slot.seconds[lattice.order])
        load: Vector = seconds[after, None] - seconds[None, before]
        crossing = self.crossing[after, None] + self.crossing[None, before]
        crossing -= self._both(before, after)
        for e, nbytes in enumerate(lattice.external_nbytes):
            crossing += nbytes * (self.outer[after, None, e] != self.outer[None, before, e])
        load += slot.seconds_per_byte * crossing
        return load

    def may_end(self, bound: float) -> list[Flags]:
        """For each stage, whether each row can be the boundary at its end if all loads are below ``bound``.

        If the units of a row take w seconds, and the values that cross its boundary take c, then
        w + c <= q * bound for the q stages before it, because one of them pays for each of these values.
        The same holds for the units outside and the stages after it. Of different stages the least cost
        counts. Only all units can end the last stage.
        """
        slots, order = self.lattice.problem.slots, self.lattice.order
        costs = np.array([[*slot.seconds[order], slot.seconds_per_byte] for slot in slots])
        before = np.minimum.accumulate(costs)  # [q - 1]: of the q stages before a boundary
        after = np.minimum.accumulate(costs[::-1])[::-1]  # [q]: of the stages after it
        found = []
        for q in range(1, len(slots)):
            first, last = before[q - 1], after[q]
            inside = self.sums(first[:-1]) + first[-1] * self.crossing
            outside = last[:-1].sum() - self.sums(last[:-1]) + last[-1] * self.crossing
            found.append((inside <= q * bound) & (outside <= (len(slots) - q) * bound))
        return [*found, np.arange(len(self.rows)) == len(self.rows) - 1]

    def may_part(self, before: Indices, after: Indices) -> Flags:
        """``[i, j]``: has the stage ``after[i] - before[j]`` enough units, if these rows nest?

        It needs one that is not auxiliary.
        """
        found: Flags = self.standalone[after, None] > self.standalone[None, before]
        return found

    def stages_below(
        self, bound: float, before: Indices, after: Indices, may: Flags, stage: int
    ) -> tuple[Indices, Indices, Vector]:
        """Where ``stage`` begins, where it ends, and its load, for all pairs of rows below ``bound``.

        ``may[i, j]``: whether the pair of ``before[j]`` and ``after[i]`` counts; it must nest, too.
        """
        chosen = may.any(axis=0)
        before = before[chosen]
        loads = self.loads(before, after, self.lattice.problem.slots[stage])
        second, earlier = np.nonzero(may[:, chosen] & (loads < bound))
        before, after, load = before[earlier], after[second], loads[second, earlier]
        for word in range(self.rows.shape[1]):
            column = self.rows[:, word]
            nested = (column[before] & ~column[after]) == 0
            before, after, load = before[nested], after[nested], load[nested]
        return before, after, load

    def _both(self, before: Indices, after: Indices) -> Vector:
        """The bytes that cross both boundaries, counted twice if the stage has no unit of the value."""
        last = self.counts[after]
        crossing = (last > 0) & (last < self.sizes)
        columns = np.flatnonzero(crossing.any(axis=0))
        last, crossing = last[:, columns], crossing[:, columns]
        first = self.counts[np.ix_(before, columns)]
        nbytes, sizes = self.nbytes[columns], self.sizes[columns]
        found: Vector = (crossing * nbytes) @ ((first > 0) & (first < sizes)).T.astype(np.float64)
        for count in range(1, int(last.max(initial=0)) + 1):
            equal = crossing & (last == count)
            some = np.flatnonzero(equal.any(axis=0))
            if len(some):
                same = (first[:, some] == count).T.astype(np.float64)
                found += (equal[:, some] * nbytes[some]) @ same
        return found


def best_boundaries(
    family: Family, bound: float, opens: list[Flags] | None = None
) -> Boundaries | None:
    """The best placement with boundaries in ``family`` and all loads below ``bound``, or None.

    The rows of ``family`` must be distinct, sorted by size, and include the empty and the full set. Of
    equal choices the earlier row is taken. ``opens[q]`` are the rows that may end stage q; the default is
    `Family.may_end`. Takes O(P * values) time for P pairs of rows, one in the other, with a load below the
    bound.
    """
    opens = family.may_end(bound) if opens is None else opens
    lattice, rows = family.lattice, family.rows
    slots, last = lattice.problem.slots, len(rows) - 1
    ends = np.array([np.arange(len(rows)) == 0, *opens])
    alive = np.flatnonzero(ends.any(axis=0))
    first = np.argmax(ends, axis=0)
    final = len(slots) - np.argmax(ends[::-1], axis=0)
    value = np.full(len(rows), np.inf)
    value[0] = 0.0
    choices: list[Indices] = []
    stages: dict[tuple[object, ...], Stages] = {}
    for q, (slot, may_end) in enumerate(zip(slots, opens, strict=True)):
        limits = stage_limits(family, slot)
        key = slot.seconds.tobytes(), slot.seconds_per_byte, *((id(s), most) for s, most in limits)
        if key not in stages:
            stages[key] = Stages(family, alive, (first, final), q, bound)
        following = np.full(len(rows), np.inf)
        choice = np.full(len(rows), len(rows), dtype=np.int64)
        for pairs in stages[key].from_rows(np.flatnonzero(value < bound)):
            reached = np.maximum(pairs.load, value[pairs.before])
            least = np.minimum.reduceat(reached, pairs.starts)
            sizes = np.diff([*pairs.starts, len(reached)])
            where = np.where(reached == np.repeat(least, sizes), pairs.before, len(rows))
            source = np.minimum.reduceat(where, pairs.starts)
            targets = pairs.after[pairs.starts]
            now = following[targets]
            better = (least < now) | ((least == now) & (source < choice[targets]))
            better &= (least < bound) & may_end[targets]
            following[targets[better]] = least[better]
            choice[targets[better]] = source[better]
        value = following
        choices.append(choice)
    if not value[last] < bound:
        return None
    at, boundaries = last, []
    for choice in reversed(choices):
        boundaries.append(rows[at])
        at = int(choice[at])
    return Boundaries(rows=tuple(boundaries[::-1]), value=float(value[last]))


def stage_limits(family: Family, slot: StageSlot) -> list[tuple[Vector, float]]:
    """Sums over rows, and the most by which each may grow within a stage: bytes, and wrongly pinned units."""
    limits = []
    order = family.lattice.order
    pins = family.lattice.problem.pins
    if slot.budget is not None:
        limits.append((family.sums(slot.nbytes[order]), slot.budget * (1 + 1e-12)))
    foreign = np.array([pins.get(int(u), slot.device) != slot.device for u in order])
    if foreign.any():
        limits.append((family.sums(foreign.astype(np.float64)), 0.5))
    return limits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """Stages below the bound, each between two rows, sorted by ``after``."""

    before: Indices
    after: Indices
    load: Vector
    starts: Indices  # where the pairs of each ``after`` begin


class Stages:
    """All stages with loads below the bound, computed when a row at which they begin is first reached."""

    def __init__(
        self,
        family: Family,
        alive: Indices,
        positions: tuple[Indices, Indices] | None,
        stage: int,
        bound: float,
    ) -> None:
        """Stages end at rows ``alive``; ``positions`` has the first and the last stage each row may end."""
        slot = family.lattice.problem.slots[stage]
        self._family, self._stage, self._slot, self._bound = family, stage, slot, bound
        self._limits = stage_limits(family, slot)
        self._alive, self._positions = alive, positions
        self._known = np.zeros(len(family.rows), dtype=bool)
        self._found: list[_Pairs] = []

    def from_rows(self, rows: Indices) -> list[_Pairs]:
        """The stages that begin at ``rows``, and those that begin at rows of earlier calls."""
        new = rows[~self._known[rows]]
        self._known[new] = True
        pairs = self._nested(new) if len(new) else None
        if pairs is not None:
            self._found.append(pairs)
        return self._found

    def _nested(self, sources: Indices) -> _Pairs | None:
        family = self._family
        seconds = family.sums(self._slot.seconds[family.lattice.order])
        parts = []
        for start in range(0, len(self._alive), _BLOCK):
            block = self._alive[start : start + _BLOCK]
            near = sources[seconds[sources] > seconds[block].min() - self._bound]
            union = np.bitwise_or.reduce(family.rows[block], axis=0)  # near rows share most units
            for word, column in zip(union, family.rows.T, strict=True):
                near = near[(column[near] & ~word) == 0]
            if not len(near):
                continue
            may = family.may_part(near, block)
            may &= seconds[block, None] - seconds[None, near] < self._bound
            if self._positions is not None:
                first, final = self._positions
                may &= first[None, near] < final[block, None]
                may &= final[None, near] >= first[block, None] - 1
            for sums, limit in self._limits:
                may &= sums[block, None] - sums[None, near] <= limit
            if not may.any():
                continue
            before, after, load = family.stages_below(self._bound, near, block, may, self._stage)
            if len(before):
                parts.append((before, after, load))
        if not parts:
            return None
        before, after, load = (np.concatenate(column) for column in zip(*parts, strict=True))
        changes = np.concatenate([[True], after[1:] != after[:-1]])
        return _Pairs(before=before, after=after, load=load, starts=np.flatnonzero(changes))
