"""Liveness of the values that recomputed and offloaded regions need: which are alive during which backward.

A region is a group of neighbouring nodes that are recomputed or offloaded together. Tables have a row for
each start of a stage and a column for each node whose backward runs. In addition to the columns in which a
node outside all regions needs a value, it is alive in these:

    recompute   a value that enters the region    from the region's first saver (node that saves) on
                a value that is made in it        from the value's first saver to the region's last saver
    offload     a value that nodes in it save     from the value's first saver to its last
    both        a value that enters the region    from the first to the last saver

The first kind is kept for every micro-batch in flight. The others are recomputed or fetched copies. They are
alive only during the region's own backward, beside any copies that other nodes keep. The region's forward
runs again before that backward; at that time the entering values, the received gradients and the memory of
the forward are alive together.

A region may be split between two stages, and which values enter it depends on where the stage starts. If a
stage ends inside a region, its backward may begin with nodes that save nothing. While these run, the values
for the first saver have not been recomputed or fetched yet, but they count. Takes
O(values in regions * starts) time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.regions import RegionKey

Table = NDArray[np.float64]
Columns = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """A region, given by positions of nodes. For each start, ``first_saver`` has the first saver after it."""

    key: RegionKey
    first: int
    last: int
    savers: tuple[int, ...]
    first_saver: Columns


@dataclass(slots=True, kw_only=True)
class _LiveValue:
    """A value that regions need, and when it is alive. Nodes are given by position.

    For each start of a stage, ``always`` has the column from which it is alive. ``passing`` lists when it is
    alive during a region's own backward: the name of a table, the first column for each start, and the column
    after the last.
    """

    producer: int
    users: list[int]
    savers: list[int]
    parts: dict[int, int]  # saver of only a part -> bytes of the part
    nbytes: int
    always: Columns
    passing: list[tuple[str, Columns, int]]
    stays: bool  # whether it is alive from forward to backward
    last_use: int  # the column after its last use in forward


class RegionLiveness:
    """Bytes of the values that regions need, in tables with a row per start and a column per position.

    Stages start at ``starts``; there are ``width`` positions. The tables are ``saved`` (alive between forward
    and backward), ``backward`` (during backward) and ``forward`` (during forward).
    """

    def __init__(
        self, costs: CostTable, place: NDArray[np.int64], starts: Sequence[int], width: int
    ) -> None:
        self._starts = np.asarray(starts, dtype=np.int64)
        self._width = width
        self._costs = costs
        self._place = place
        names = ("kept", "fetched", "inside", "saved", "forward")
        self._steps = {name: self._empty() for name in names}
        # value -> for each reason to keep it, the first column of every row
        self._since: dict[int, list[Columns]] = {}
        self._again = self._empty()  # alive while the forward is recomputed
        self._private = np.zeros((len(starts), width))
        keys: list[RegionKey | None] = [None] * width
        for node, key in enumerate(costs.keys):
            keys[int(place[node])] = key
        saving = {int(place[i]) for i in costs.saving}
        self._regions: list[_Region] = []
        self._region_of = np.full(width, -1)
        for position, key in enumerate(keys):
            if key is None:
                continue
            if position and keys[position - 1] == key:
                self._region_of[position] = len(self._regions) - 1
                continue
            last = position
            while last + 1 < width and keys[last + 1] == key:
                last += 1
            self._region_of[position] = len(self._regions)
            self._regions.append(self._region(key, position, last, saving))

    def _region(self, key: RegionKey, first: int, last: int, saving: set[int]) -> _Region:
        savers = np.asarray([p for p in range(first, last + 1) if p in saving], dtype=np.int64)
        index = np.searchsorted(savers, np.maximum(self._starts, first))
        found = np.append(savers, self._width)[index]
        return _Region(
            key=key, first=first, last=last, savers=tuple(savers.tolist()), first_saver=found
        )

    def take(self, index: int) -> bool:
        """Count the value with this index if some region needs it. Returns whether one does."""
        value = self._costs.values[index]
        place, starts = self._place, self._starts
        users = sorted({int(place[i]) for i in (*value.users, *value.savers)})
        savers = sorted({int(place[i]) for i in value.savers})
        needed = {int(self._region_of[p]) for p in users} - {-1}
        if not needed:
            return False
        outside = [s for s in savers if self._region_of[s] < 0]
        always = np.full(len(starts), self._width)
        for s in reversed(outside):
            always[starts <= s] = s
        live = _LiveValue(
            producer=int(place[value.producer]) if value.producer >= 0 else -1,
            users=users,
            savers=savers,
            parts={int(place[node]): part for node, part in value.parts},
            nbytes=value.nbytes,
            always=always,
            passing=[],
            stays=bool(outside),
            last_use=users[-1] + 1,
        )
        for number in sorted(needed):
            if self._regions[number].key.recompute:
                self._recompute(live, number)
            else:
                self._offload(live, number)
        self._since[index] = [live.always, *(since for _, since, _ in live.passing)]
        self._count(live)
        return True

    def _recompute(self, live: _LiveValue, number: int) -> None:
        """Record when the value is alive for the recomputed region with this number."""
        region, starts, none = self._regions[number], self._starts, self._width
        inside = [p for p in live.users if self._region_of[p] == number]
        saving = [s for s in live.savers if self._region_of[s] == number]
        enters = (live.producer < np.maximum(starts, region.first)) & (starts <= inside[-1])
        since = np.where(enters, region.first_saver, none)
        if region.key.offload:
            live.passing.append(("fetched", since, max(region.savers, default=-1) + 1))
        else:
            live.always = np.minimum(live.always, since)
            live.stays |= live.producer < region.first
        if live.producer < region.first:
            live.last_use = max(live.last_use, region.last + 1)
        elif saving or inside[-1] > live.producer:
            made = ~enters & (starts <= live.producer)
            if saving:
                since = np.where(made, saving[0], none)
                live.passing.append(("inside", since, region.savers[-1] + 1))
            until = region.last + 1 if saving else inside[-1] + 1
            begin = np.where(made, live.producer + 1, none)
            _fill(self._again, begin, until, live.nbytes)

    def _offload(self, live: _LiveValue, number: int) -> None:
        """Record when the value is on the device for the offloaded region with this number."""
        starts, none = self._starts, self._width
        saving = [s for s in live.savers if self._region_of[s] == number]
        if len(live.savers) > 1:  # each part is fetched separately
            for s in [s for s in saving if s in live.parts]:
                since = np.where(starts <= s, s, none)
                _fill(self._steps["kept"], since, s + 1, live.parts[s])
            saving = [s for s in saving if s not in live.parts]
        if saving:
            since = np.append(saving, none)[np.searchsorted(saving, starts)]
            live.passing.append(("kept", since, saving[-1] + 1))

    def _count(self, live: _LiveValue) -> None:
        """Add the value to the tables for the columns recorded in it."""
        starts, none = self._starts, self._width
        _fill(self._steps["saved"], live.always, none, live.nbytes)
        self._add_backward("kept", live.always, none, live.nbytes, live.savers)
        for name, since, until in live.passing:
            self._add_backward(name, since, until, live.nbytes, live.savers)
        if live.producer >= 0:
            begin = np.where(starts <= live.producer, live.producer + 1, none)
            last_use = none if live.stays else min(live.last_use, none)
            _fill(self._steps["forward"], begin, last_use, live.nbytes)

    def table(self, name: str) -> Table:
        """The table with this name: ``saved``, ``backward`` or ``forward``."""
        steps = self._steps
        if name == "backward":
            return self._sum(steps["kept"] + steps["fetched"] + steps["inside"])
        return self._sum(steps[name])

    def live_from(self, index: int, column: int) -> Iterator[tuple[int, int]]:
        """Yields (first, last) starts of stages in which a copy of the value is alive from ``column`` on."""
        copies = self._since.get(index, [np.full(len(self._starts), self._width)])
        for row in np.flatnonzero(np.any([since == column for since in copies], axis=0)):
            yield int(self._starts[row]), int(self._starts[row])

    def peak_while_recomputing(
        self, backward: Table, incoming: Table, forward_transient: Table
    ) -> Table:
        """The bytes alive while a region is recomputed, in the columns of the region's savers.

        ``backward`` has the bytes of values outside regions. ``incoming`` and ``forward_transient`` have one
        entry per position.
        """
        found = np.zeros((len(self._starts), self._width))
        there = self._sum(self._steps["kept"]) + self._sum(self._steps["fetched"])
        base = backward + there + self._private + incoming
        again = self._sum(self._again)
        ends_early = self._stops_before_it_runs()
        for region in self._regions:
            if not region.key.recompute or not region.savers:
                continue
            columns = np.arange(region.first, region.last + 1)
            inside = columns[None, :] >= self._starts[:, None]
            alone = again[:, columns]
            whole = np.where(inside, alone + forward_transient[columns], -np.inf)
            most = np.maximum.accumulate(whole, axis=1)
            before = np.concatenate([np.full((len(most), 1), -np.inf), most[:, :-1]], axis=1)
            for p in region.savers:
                i = p - region.first
                peak = np.maximum(before[:, i], alone[:, i]) if p in ends_early else most[:, i]
                found[:, p] = np.where(inside[:, i], base[:, p] + peak, 0.0)
        return found

    def _stops_before_it_runs(self) -> set[int]:
        """Nodes that save no result of their own; a recomputation may stop before them."""
        saves_own = {v.producer for v in self._costs.values if v.producer in v.savers}
        return {int(self._place[i]) for i in range(len(self._costs.names)) if i not in saves_own}

    def _add_backward(
        self, name: str, since: Columns, until: int, nbytes: int, savers: Sequence[int]
    ) -> None:
        """Add a value to the backward table ``name``, in columns since … until - 1.

        If the value has a single saver, that saver's column is left out, because its transient bytes include
        the value.
        """
        steps = self._steps[name]
        if len(savers) != 1:
            _fill(steps, since, until, nbytes)
            return
        (own,) = savers
        _fill(steps, since, min(until, own), nbytes)
        _fill(steps, np.maximum(since, own + 1), until, nbytes)
        if name != "inside" and self._region_of[own] >= 0:
            rows = (since <= own) & (own < until)
            self._private[rows, own] += nbytes

    def _empty(self) -> Table:
        return np.zeros((len(self._starts), self._width + 1))

    @staticmethod
    def _sum(steps: Table) -> Table:
        sums: Table = np.cumsum(steps, axis=1)[:, :-1]
        return sums


def _fill(steps: Table, since: Columns, until: int, nbytes: int) -> None:
    """Add ``nbytes`` to columns since … until - 1 of a difference array; ``since`` has one entry per row."""
    rows = np.flatnonzero(since < until)
    steps[rows, since[rows]] += nbytes
    steps[rows, until] -= nbytes
