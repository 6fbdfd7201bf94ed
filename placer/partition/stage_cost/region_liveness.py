"""Finds which values recomputed and offloaded regions keep alive, and when.

Tables have a row for each start of a stage and a column for each node whose backward runs. A value is
alive in these columns, in addition to those in which a node outside all regions needs it:

    recompute   a value that enters the region    from the region's first saver (node that saves) on
                a value that is made in it        from the value's first saver to the region's last saver
    offload     a value that nodes in it save     from the value's first saver to its last
    both        a value that enters the region    from the first to the last saver

The first kind is kept for every micro-batch in flight. The others are copies, recomputed or fetched, which
are alive only during the region's own backward, beside those that other nodes keep. Before that backward,
the region's forward runs again; then entering values, received gradients, and the memory of the forward
are alive together.

A region may be split between two stages, and the values that enter it depend on where the stage starts.
If a stage ends inside a region, its backward begins with nodes that save nothing, and values for the
first saver have not been recomputed or fetched yet; `not_yet` has corrections for such stages. Takes
O(values in regions * starts) time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.partition.stage_cost.pending_gradients import IntervalCorrection
from placer.partition.stage_cost.received import copied_parts
from placer.regions import RegionKey

Table = NDArray[np.float64]
Columns = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A region, as positions of nodes; ``first_saver`` has for each start the first saver after it."""

    key: RegionKey
    first: int
    last: int
    savers: tuple[int, ...]
    first_saver: Columns


@dataclass(slots=True, kw_only=True)
class _Held:
    """A value that regions need, and when it is alive; nodes are given as positions.

    For each start of a stage, ``nbytes`` has its bytes, and ``always`` the column from which on it is
    alive. ``passing`` has columns in which it is alive during a region's own backward: the name of a
    table, the first columns, and the column after the last.
    """

    producer: int
    users: list[int]
    savers: list[int]
    parts: dict[int, int]  # for savers of only a part, its bytes
    nbytes: Table
    always: Columns
    passing: list[tuple[str, Columns, int]]
    stays: bool  # whether it is alive from forward to backward
    last_use: int  # the column after its last use in forward


class RegionLiveness:
    """Tables of bytes, with a row for each of ``starts`` and a column for each of ``width`` positions.

    Stages end at ``ends``. The tables are ``saved`` (between forward and backward), ``waiting`` (during
    backward) and ``forward`` (during forward).
    """

    def __init__(
        self,
        costs: CostTable,
        place: NDArray[np.int64],
        starts: Sequence[int],
        ends: Sequence[int],
        width: int,
    ) -> None:
        self._starts = np.asarray(starts, dtype=np.int64)
        self._ends = sorted(ends)
        self._width = width
        self._costs = costs
        self._place = place
        names = ("kept", "fetched", "inside", "saved", "forward")
        self._steps = {name: self._empty() for name in names}
        # For each value, the rows in which only parts of it are received
        self._parts: dict[int, list[tuple[int, int]]] = {}
        row_of = {start: row for row, start in enumerate(starts)}
        for index, start, nbytes in copied_parts(costs, place, starts):
            self._parts.setdefault(index, []).append((row_of[start], nbytes))
        # For each value, and each reason to keep it, the first column of every row
        self._since: dict[int, list[Columns]] = {}
        # Savers of a value in a region; for each row its first column, the column after the last, bytes.
        self._offloaded: list[tuple[Sequence[int], Columns, Columns, Table]] = []
        self._again = self._empty()  # alive while the forward runs again
        self._private = np.zeros((len(starts), width))
        keys: list[RegionKey | None] = [None] * width
        for node, key in enumerate(costs.keys):
            keys[int(place[node])] = key
        saving = {int(place[i]) for i in costs.saving}
        self._runs: list[_Run] = []
        self._run_of = np.full(width, -1)
        for position, key in enumerate(keys):
            if key is None:
                continue
            if position and keys[position - 1] == key:
                self._run_of[position] = len(self._runs) - 1
                continue
            last = position
            while last + 1 < width and keys[last + 1] == key:
                last += 1
            self._run_of[position] = len(self._runs)
            self._runs.append(self._run(key, position, last, saving))

    def _run(self, key: RegionKey, first: int, last: int, saving: set[int]) -> _Run:
        savers = np.asarray([p for p in range(first, last + 1) if p in saving], dtype=np.int64)
        index = np.searchsorted(savers, np.maximum(self._starts, first))
        found = np.append(savers, self._width)[index]
        return _Run(
            key=key, first=first, last=last, savers=tuple(savers.tolist()), first_saver=found
        )

    def take(self, index: int) -> bool:
        """Count the value with this index if a region needs it; False if none does."""
        value = self._costs.values[index]
        place, starts = self._place, self._starts
        users = sorted({int(place[i]) for i in (*value.users, *value.savers)})
        savers = sorted({int(place[i]) for i in value.savers})
        needed = {int(self._run_of[p]) for p in users} - {-1}
        if not needed:
            return False
        nbytes = np.full(len(starts), float(value.nbytes))
        for row, of_parts in self._parts.get(index, ()):
            nbytes[row] = of_parts
        outside = [s for s in savers if self._run_of[s] < 0]
        always = np.full(len(starts), self._width)
        for s in reversed(outside):
            always[starts <= s] = s
        held = _Held(
            producer=int(place[value.producer]) if value.producer >= 0 else -1,
            users=users,
            savers=savers,
            parts={int(place[node]): part for node, part in value.parts},
            nbytes=nbytes,
            always=always,
            passing=[],
            stays=bool(outside),
            last_use=users[-1] + 1,
        )
        for number in sorted(needed):
            if self._runs[number].key.recompute:
                self._recompute(held, number)
            else:
                self._offload(held, number)
        self._since[index] = [held.always, *(since for _, since, _ in held.passing)]
        self._count(held)
        return True

    def _recompute(self, held: _Held, number: int) -> None:
        """Record when the value is alive for the recomputed region with this number."""
        run, starts, none = self._runs[number], self._starts, self._width
        inside = [p for p in held.users if self._run_of[p] == number]
        saving = [s for s in held.savers if self._run_of[s] == number]
        enters = (held.producer < np.maximum(starts, run.first)) & (starts <= inside[-1])
        since = np.where(enters, run.first_saver, none)
        if run.key.offload:
            held.passing.append(("fetched", since, max(run.savers, default=-1) + 1))
        else:
            held.always = np.minimum(held.always, since)
            held.stays |= held.producer < run.first
        if held.producer < run.first:
            held.last_use = max(held.last_use, run.last + 1)
        elif saving or inside[-1] > held.producer:
            made = ~enters & (starts <= held.producer)
            if saving:
                since = np.where(made, saving[0], none)
                held.passing.append(("inside", since, run.savers[-1] + 1))
            until = run.last + 1 if saving else inside[-1] + 1
            begin = np.where(made, held.producer + 1, none)
            _fill(self._again, begin, np.full(len(starts), until), held.nbytes)

    def _offload(self, held: _Held, number: int) -> None:
        """Record when the value is on the device for the offloaded region with this number."""
        starts, none = self._starts, self._width
        saving = [s for s in held.savers if self._run_of[s] == number]
        if len(held.savers) > 1:  # each part is fetched separately
            for s in [s for s in saving if s in held.parts]:
                since = np.where(starts <= s, s, none)
                until = np.full(len(starts), s + 1)
                part = np.full(len(starts), float(held.parts[s]))
                _fill(self._steps["kept"], since, until, part)
            saving = [s for s in saving if s not in held.parts]
        if saving:
            since = np.append(saving, none)[np.searchsorted(saving, starts)]
            held.passing.append(("kept", since, saving[-1] + 1))
            if len(saving) > 1:
                until = np.full(len(starts), saving[-1] + 1)
                self._offloaded.append((saving, since, until, held.nbytes))

    def _count(self, held: _Held) -> None:
        """Add the value to the tables, as recorded."""
        starts, none = self._starts, self._width
        end = np.full(len(starts), none)
        _fill(self._steps["saved"], held.always, end, held.nbytes)
        self._wait("kept", held.always, end, held.nbytes, held.savers)
        for name, since, last in held.passing:
            until = np.full(len(starts), last)
            self._wait(name, since, until, held.nbytes, held.savers)
        if held.producer >= 0:
            begin = np.where(starts <= held.producer, held.producer + 1, none)
            last_use = none if held.stays else min(held.last_use, none)
            _fill(self._steps["forward"], begin, np.full(len(starts), last_use), held.nbytes)

    def table(self, name: str) -> Table:
        """The table with this name: ``saved``, ``waiting`` or ``forward``."""
        if name == "waiting":
            return self._sum(self._steps["kept"]) + self._passing()
        return self._sum(self._steps[name])

    def _passing(self) -> Table:
        """The bytes that are alive only during a recomputed region's own backward."""
        return self._sum(self._steps["fetched"]) + self._sum(self._steps["inside"])

    def held_from(self, index: int, column: int) -> Iterator[tuple[int, int]]:
        """First and last starts of stages in which a copy of the value is alive from ``column`` on."""
        copies = self._since.get(index, [np.full(len(self._starts), self._width)])
        for row in np.flatnonzero(np.any([since == column for since in copies], axis=0)):
            yield int(self._starts[row]), int(self._starts[row])

    def not_yet(self) -> Iterator[IntervalCorrection]:
        """Corrections of the table ``waiting`` for stages that end inside a region."""
        passing = self._passing()
        for run in self._runs:
            if not run.key.recompute:
                continue
            for saver, following in self._split_gaps(run.savers):
                amounts = passing[:, saver + 1]
                yield from self._less(saver, following, amounts)
        for savers, since, until, nbytes in self._offloaded:
            for saver, following in self._split_gaps(savers):
                there = (since <= saver) & (until > saver + 1)
                yield from self._less(saver, following, np.where(there, nbytes, 0.0))

    def _split_gaps(self, savers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of neighbouring ``savers`` that have other nodes between them, at which a stage may end."""
        for saver, following in pairwise(savers):
            if any(saver + 1 < end <= following for end in self._ends):
                yield saver, following

    def _less(self, saver: int, following: int, amounts: Table) -> Iterator[IntervalCorrection]:
        """Corrections that subtract ``amounts`` (one per row) for stages that end between the two savers."""
        rows = range(int(np.searchsorted(self._starts, saver, side="right")))
        for nbytes, group in groupby(rows, key=lambda row: float(amounts[row])):
            same = list(group)
            if nbytes:
                yield IntervalCorrection(
                    first=int(self._starts[same[0]]),
                    last=int(self._starts[same[-1]]),
                    begin=saver + 1,
                    until=following,
                    sender=following,
                    nbytes=-nbytes,
                )

    def recomputing(self, waiting: Table, incoming: Table, forward_transient: Table) -> Table:
        """The bytes alive while a region's forward runs again, in the columns of the region's savers.

        ``waiting`` has the bytes that no region needs; ``incoming`` and ``forward_transient`` have a number
        for each position.
        """
        found = np.zeros((len(self._starts), self._width))
        there = self._sum(self._steps["kept"]) + self._sum(self._steps["fetched"])
        base = waiting + there + self._private + incoming
        again = self._sum(self._again)
        ends_early = self._stops_before_it_runs()
        for run in self._runs:
            if not run.key.recompute or not run.savers:
                continue
            columns = np.arange(run.first, run.last + 1)
            inside = columns[None, :] >= self._starts[:, None]
            alone = again[:, columns]
            whole = np.where(inside, alone + forward_transient[columns], -np.inf)
            most = np.maximum.accumulate(whole, axis=1)
            before = np.concatenate([np.full((len(most), 1), -np.inf), most[:, :-1]], axis=1)
            for p in run.savers:
                i = p - run.first
                held = np.maximum(before[:, i], alone[:, i]) if p in ends_early else most[:, i]
                found[:, p] = np.where(inside[:, i], base[:, p] + held, 0.0)
        return found

    def _stops_before_it_runs(self) -> set[int]:
        """The nodes that save none of their own results, which a second forward need not run at its end."""
        saves_own = {v.producer for v in self._costs.values if v.producer in v.savers}
        return {int(self._place[i]) for i in range(len(self._costs.names)) if i not in saves_own}

    def _wait(
        self, name: str, since: Columns, until: Columns, nbytes: Table, savers: Sequence[int]
    ) -> None:
        """Count a value in columns since … until - 1.

        If it has a single saver, its column is left out, because the saver's transient bytes include it.
        """
        steps = self._steps[name]
        if len(savers) != 1:
            _fill(steps, since, until, nbytes)
            return
        (own,) = savers
        _fill(steps, since, np.minimum(until, own), nbytes)
        _fill(steps, np.maximum(since, own + 1), until, nbytes)
        if name != "inside" and self._run_of[own] >= 0:
            rows = (since <= own) & (own < until)
            self._private[rows, own] += nbytes[rows]

    def _empty(self) -> Table:
        return np.zeros((len(self._starts), self._width + 1))

    @staticmethod
    def _sum(steps: Table) -> Table:
        sums: Table = np.cumsum(steps, axis=1)[:, :-1]
        return sums


def _fill(steps: Table, since: Columns, until: Columns, nbytes: Table) -> None:
    """Add ``nbytes`` to columns since … until - 1; all three have an entry for each row."""
    rows = np.flatnonzero(since < until)
    steps[rows, since[rows]] += nbytes[rows]
    steps[rows, until[rows]] -= nbytes[rows]
