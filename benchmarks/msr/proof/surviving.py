"""Enumerates all downsets that may be boundaries of a placement with all loads below a bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from benchmarks.msr.proof.conditions import BoundaryConditions
from benchmarks.msr.proof.work import Work
from placer.partition.solver.families import distinct
from placer.partition.solver.lattice import BitSums, Flags, Lattice, Words, num_words, pack
from placer.partition.solver.problem import Vector

# Nanoseconds to decide a unit; in addition for each downset; and in addition for each unit and value.
_STEP, _UNDECIDED, _PER_BIT = 1e5, 250.0, 0.5


def surviving_rows(
    conditions: BoundaryConditions, *, most: int, work: Work | None = None
) -> Words | None:
    """All downsets that ``conditions`` allow as a boundary, including the empty and the full one.

    Units are decided in topological order to be in or out; if a unit is out, so are all its descendants.
    All partial decisions are extended together, and those that ``conditions`` rule out are dropped. None
    if there are more than ``most`` partial decisions at a time, or ``work`` is spent.
    """
    work = work or Work()
    deciding = _Deciding(conditions)
    for u in range(conditions.lattice.num_units):
        work.take(deciding.decide(u))
        alive = len(deciding.rows.inside)
        if alive > most or sum(map(len, deciding.done)) > most or work.is_spent():
            return None
        if not alive:
            break
    return distinct(np.concatenate(deciding.done))


class _Partial(NamedTuple):
    """Partly decided downsets, one per row: units in and out, values with units in and out, and sums."""

    inside: Words
    outside: Words
    touched_in: Words
    touched_out: Words
    sum_in: Vector
    sum_out: Vector
    crossing: Vector  # bytes of the values that are in both touched_in and touched_out

    def at(self, which: Flags) -> _Partial:
        rows = np.flatnonzero(which)
        if len(rows) == len(which):
            return self
        return _Partial._make(column.take(rows, axis=0) for column in self)


class _Deciding:
    """All partial decisions so far (``rows``), and the downsets that are complete (``done``)."""

    def __init__(self, conditions: BoundaryConditions) -> None:
        lattice = conditions.lattice
        n, m = lattice.num_units, len(lattice.values)
        self._size = n + m
        self._conditions = conditions
        columns = len(conditions.columns)
        self._weights = np.array(conditions.columns).reshape(columns, n)  # no columns for one stage
        self._sums_of = BitSums(self._weights.T)
        self._crossing_of = BitSums(lattice.value_nbytes[:, None])
        self._after = _with_later(lattice, np.array([_bit_row([u], n) for u in range(n)]))
        self._after_sums = self._sums_of(self._after)
        self._touched_by = np.array([_bit_row(v, m) for v in lattice.values_of])
        self._touched_after = _with_later(lattice, self._touched_by)
        self._rest = _bit_row(range(n), n)  # units that are not decided yet
        units, values = _bit_row((), n)[None], _bit_row((), m)[None]
        self.rows = _Partial(
            inside=units,
            outside=units,
            touched_in=values,
            touched_out=values,
            sum_in=np.zeros((1, columns)),
            sum_out=np.zeros((1, columns)),
            crossing=np.zeros(1),
        )
        self.done = [units, self._rest[None]]

    def decide(self, u: int) -> float:
        """Decide unit ``u``, the next one; returns an estimate of the nanoseconds that this takes."""
        word, bit = u // 64, np.uint64(1 << (u % 64))
        self._rest = self._rest.copy()
        self._rest[word] &= ~bit
        is_free = (self.rows.outside[:, word] & bit) == 0
        free = self.rows.at(is_free)
        following = [
            self._going_on(half, word) for half in (self._without(u, free), self._with(u, free))
        ]
        columns = zip(self.rows.at(~is_free), *following, strict=True)
        self.rows = _Partial._make(map(np.concatenate, columns))
        return _STEP + (_UNDECIDED + _PER_BIT * self._size) * int(is_free.sum())

    def _without(self, u: int, free: _Partial) -> _Partial:
        """The decisions ``free`` with ``u`` and all its descendants out."""
        after = self._after[u]
        fresh = after & ~free.outside
        sum_out = free.sum_out + self._after_sums[u]  # correct if none of these was out before
        some = np.flatnonzero((fresh != after).any(axis=1))
        sum_out[some] = free.sum_out[some] + self._sums_of(fresh[some])
        begun = free.touched_in & ~free.touched_out & self._touched_after[u]
        return free._replace(
            outside=free.outside | after,
            touched_out=free.touched_out | self._touched_after[u],
            sum_out=sum_out,
            crossing=free.crossing + self._crossing_of(begun)[:, 0],
        )

    def _with(self, u: int, free: _Partial) -> _Partial:
        """The decisions ``free`` with ``u`` in."""
        begun = free.touched_out & ~free.touched_in & self._touched_by[u]
        inside = free.inside.copy()
        inside[:, u // 64] |= np.uint64(1 << (u % 64))
        return free._replace(
            inside=inside,
            touched_in=free.touched_in | self._touched_by[u],
            sum_in=free.sum_in + self._weights[:, u],
            crossing=free.crossing + self._crossing_of(begun)[:, 0],
        )

    def _going_on(self, rows: _Partial, word: int) -> _Partial:
        """The ``rows`` that may end a stage and are incomplete; complete ones are added to ``done``.

        All units in words before ``word`` are decided.
        """
        alive = self._conditions.some(rows.sum_in, rows.sum_out, rows.crossing)
        rest = self._rest[word:]
        complete = (rows.outside[:, word:] & rest == rest).all(axis=1)
        self.done.append(rows.inside[alive & complete])
        return rows.at(alive & ~complete)


def _with_later(lattice: Lattice, rows: Words) -> Words:
    """For each unit the union of its row and the rows of all its descendants."""
    found = rows.copy()
    for u in reversed(range(lattice.num_units)):
        for reader in lattice.succs[u]:
            found[u] |= found[reader]
    return found


def _bit_row(members: Iterable[int], bits: int) -> Words:
    """One row with the bits of ``members`` set."""
    flags = np.zeros(num_words(bits) * 64, dtype=bool)
    flags[list(members)] = True
    row: Words = pack(flags[None])[0]
    return row
