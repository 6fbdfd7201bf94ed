"""What units without edges cost the stages of a family of downsets, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.lattice import Lattice
from placer.partition.solver.problem import Vector

Indices = NDArray[np.int64]
Rows = NDArray[np.int64] | NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """A value that isolated units share: which ones, and how many units of the lattice."""

    nbytes: float
    isolated: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IsolatedGroup:
    """Isolated units that share values with each other, and all values that they share."""

    isolated: tuple[int, ...]  # units of the problem
    values: tuple[_Shared, ...]
    number: int
    held: NDArray[np.int16]  # the kinds of rows: how many units of each value they have


class IsolatedCosts:
    """The isolated units of a lattice: its problem's units that are not in it."""

    def __init__(self, lattice: Lattice, flags: NDArray[np.uint8]) -> None:
        """``flags``: the downsets, a column for each unit of the lattice."""
        problem = lattice.problem
        place = np.full(problem.num_units, -1, dtype=np.int64)
        place[lattice.order] = np.arange(lattice.num_units)
        near: nx.Graph = nx.Graph()
        near.add_nodes_from(np.flatnonzero(place < 0).tolist())
        merged: dict[tuple[int, ...], float] = {}
        self._kinds: list[Indices] = []  # per group, of each row
        if near:
            for value in problem.values:
                units = tuple(sorted(set(value.units)))
                if len(units) > 1 and value.nbytes and (place[list(units)] < 0).any():
                    merged[units] = merged.get(units, 0.0) + value.nbytes
        for units in merged:
            nx.add_path(near, [u for u in units if place[u] < 0])
        self.groups: list[IsolatedGroup] = []
        for isolated in sorted(tuple(sorted(g)) for g in nx.connected_components(near)):
            values, counts = [], []
            for units in sorted(units for units in merged if set(isolated) & set(units)):
                members = [int(place[u]) for u in units if place[u] >= 0]
                own = tuple(u for u in units if place[u] < 0)
                values.append(_Shared(nbytes=merged[units], isolated=own, size=len(members)))
                counts.append(flags[:, members].sum(axis=1, dtype=np.int16))
            kind, first = _kinds(counts, [value.size for value in values], len(flags))
            self.groups.append(
                IsolatedGroup(
                    number=len(self.groups),
                    isolated=isolated,
                    values=tuple(values),
                    held=np.array([c[first] for c in counts], dtype=np.int16)
                    .reshape(-1, len(first))
                    .T,
                )
            )
            self._kinds.append(kind)
        self._tables: dict[tuple[object, ...], Vector] = {}
        self.group_of = {f: group for group in self.groups for f in group.isolated}
        self._seconds = np.array([s.seconds for s in problem.slots]).T
        self._rate = np.array([s.seconds_per_byte for s in problem.slots])
        costs = [(s.seconds.tobytes(), s.seconds_per_byte) for s in problem.slots]
        self._slots = [costs.index(cost) for cost in costs]

    def cost(
        self,
        group: IsolatedGroup,
        before: Rows,
        after: Rows,
        stage: int,
        fixed: Mapping[int, int],
    ) -> Vector:
        """``[i]``: what ``group`` costs the stage from row ``before[i]`` to ``after[i]``.

        ``fixed`` are the stages of some isolated units. Of the others each is there or elsewhere, whichever
        costs less; where two or more of these share a value it is paid if the stage has some but
        not all of what is certain: a lower bound.
        """
        here = tuple(fixed[f] == stage if f in fixed else None for f in group.isolated)
        kinds = self._kinds[group.number]
        table = self._tabled(group, here, stage)
        found: Vector = table[kinds[after] * len(group.held) + kinds[before]]
        return found

    def along(
        self,
        group: IsolatedGroup,
        before: Rows,
        after: Rows,
        fixed: Mapping[int, int],
        unit: int,
    ) -> tuple[Vector, Vector, Vector]:
        """What ``group`` costs each stage of a chain: ``unit`` anywhere, elsewhere, or there."""
        kinds = self._kinds[group.number]
        cell = kinds[after] * len(group.held) + kinds[before]
        costs = np.empty((3, len(cell)))
        several = any(f in fixed for f in group.isolated) or any(self._slots)
        for i, place in enumerate((None, False, True)):
            for q in range(len(cell)) if several else (0,):
                here = tuple(
                    place if f == unit else fixed[f] == q if f in fixed else None
                    for f in group.isolated
                )
                table = self._tabled(group, here, q)
                costs[i, q if several else slice(None)] = table[cell[q] if several else cell]
        now, away, there = costs
        return now, away, there

    def least(self, before: Rows, after: Rows, stage: int) -> Vector:
        """What all isolated units cost at least, wherever they are."""
        total: Vector = np.zeros(len(before))
        for group in self.groups:
            total += self.cost(group, before, after, stage, {})
        return total

    def _tabled(self, group: IsolatedGroup, here: tuple[bool | None, ...], stage: int) -> Vector:
        key = group.number, here, self._slots[stage]
        if key not in self._tables:
            self._tables[key] = self._table(group, here, stage)
        return self._tables[key]

    def _table(self, group: IsolatedGroup, here: Sequence[bool | None], stage: int) -> Vector:
        """The cost for a row of each kind after one of each kind."""
        held = group.held[:, None] - group.held[None]
        total: Vector = np.zeros(held.shape[:2])
        at = dict(zip(group.isolated, here, strict=True))
        with_it, without = {}, {}
        for f in group.isolated:
            seconds = self._seconds[f, stage]
            if at[f] is None:
                with_it[f], without[f] = total * 0 + seconds, total * 0
        total += sum(self._seconds[f, stage] for f in group.isolated if at[f])
        for column, value in enumerate(group.values):
            some, lacks = held[:, :, column] > 0, held[:, :, column] < value.size
            for place in (at[f] for f in value.isolated):
                if place is not None:
                    some, lacks = some | place, lacks | (not place)
            free = [f for f in value.isolated if at[f] is None]
            paid = value.nbytes * self._rate[stage]
            if len(free) == 1:
                with_it[free[0]] += paid * lacks
                without[free[0]] += paid * some
            else:
                total += paid * (some & lacks)
        for f in with_it:
            total += np.minimum(with_it[f], without[f])
        return total.ravel()


def _kinds(
    counts: Sequence[NDArray[np.int16]], sizes: Sequence[int], num_rows: int
) -> tuple[Indices, Indices]:
    """Rows with equal counts are of one kind: the kind of each row, and a row of each kind."""
    kind, many = np.zeros(num_rows, dtype=np.int64), 1
    for count, size in zip(counts, sizes, strict=True):
        kind = kind * (size + 1) + count
        many *= size + 1
        used = np.flatnonzero(np.bincount(kind, minlength=many))
        number = np.empty(many, dtype=np.int64)
        number[used] = np.arange(len(used))
        kind, many = number[kind], len(used)
    first = np.zeros(many, dtype=np.int64)
    first[kind[::-1]] = np.arange(num_rows)[::-1]
    return kind, first
