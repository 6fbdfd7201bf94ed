"""All downsets that a bound leaves alive as borders of stages: the family that a proof is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.conditions import BorderConditions
from placer.partition.solver.families import distinct
from placer.partition.solver.lattice import BitSums, Flags, Lattice, Words, bit_row, num_words
from placer.partition.solver.problem import Vector
from placer.partition.solver.work import Work

# Nanoseconds for deciding a unit, for each downset then, and for each unit and value.
_STEP, _UNDECIDED, _PER_BIT = 1e5, 250.0, 0.5


def surviving_rows(
    conditions: BorderConditions, *, most: int, work: Work | None = None
) -> Words | None:
    """Every downset that ``conditions`` allow as a border of a placement.

    Units are decided in topological order, in or out (out with all that follows it), all partial
    decisions at once; those that ``conditions`` close are dropped. None when more than ``most``
    partial decisions would be alive, or ``work`` is spent. The empty and the full set are in the
    answer.
    """
    work = work or Work()
    deciding = _Deciding(conditions)
    for u in range(conditions.lattice.num_units):
        work.take(deciding.decide(u))
        alive = len(deciding.rows)
        if alive > most or sum(map(len, deciding.done)) > most or work.is_spent():
            return None
        if not alive:
            break
    return distinct(np.concatenate(deciding.done))


class _Deciding:
    """All partial decisions that are alive (``rows``), and the downsets that came of others."""

    def __init__(self, conditions: BorderConditions) -> None:
        lattice = conditions.lattice
        n, m = lattice.num_units, len(lattice.values)
        self._size = n + m
        self._conditions = conditions
        columns = self._conditions.columns
        self._weights = np.array(columns).reshape(len(columns), n)  # no columns for one stage
        self._sums_of = BitSums(self._weights.T)
        self._cut_of = BitSums(self._conditions.cut_nbytes[:, None])
        self._after = _with_later(lattice, np.array([bit_row([u], n) for u in range(n)]))
        self._after_sums = self._sums_of(self._after)
        self._touched_by = np.array([bit_row(v, m) for v in lattice.values_of])
        self._touched_after = _with_later(lattice, self._touched_by)
        self._rest = bit_row(range(n), n)  # units that are still to be decided
        self.rows = _Undecided(num_words(n), num_words(m), len(columns))
        self.done = [bit_row((), n)[None], self._rest[None]]

    def decide(self, u: int) -> float:
        """Decide unit ``u``, the next one; an estimate of the nanoseconds that this takes."""
        word, bit = u // 64, np.uint64(1 << (u % 64))
        self._rest = self._rest.copy()
        self._rest[word] &= ~bit
        which = np.flatnonzero((self.rows.outside[:, word] & bit) == 0)
        free = _Free(
            which=which,
            outside=self.rows.outside[which],
            touched_in=self.rows.touched_in[which],
            touched_out=self.rows.touched_out[which],
            sum_in=self.rows.sum_in[which],
            sum_out=self.rows.sum_out[which],
            cut=self.rows.cut[which],
        )
        added = self._leave_out(u, free)
        removed = self._take_in(u, free)
        self.rows.replace(removed, added)
        return _STEP + (_UNDECIDED + _PER_BIT * self._size) * len(which)

    def _leave_out(self, u: int, free: _Free) -> _Undecided:
        """The decisions with ``u`` left out, and all that follows it, that go on."""
        after, word = self._after[u], u // 64
        fresh = after & ~free.outside
        sum_out = free.sum_out + self._after_sums[u]  # right where none of these was out before
        some = np.flatnonzero((fresh != after).any(axis=1))
        sum_out[some] = free.sum_out[some] + self._sums_of(fresh[some])
        begun = free.touched_in & ~free.touched_out & self._touched_after[u]
        cut = free.cut + self._cut_of(begun)[:, 0]
        kept = np.flatnonzero(self._conditions.some(free.sum_in, sum_out, cut))
        complete = self._is_complete(free.outside[kept, word:] | after[word:], word)
        self._finish(free.which[kept[complete]])
        kept = kept[~complete]
        added = self.rows.copy(free.which[kept])
        added.outside[:] |= after
        added.touched_out[:] |= self._touched_after[u]
        added.sum_out[:], added.cut[:] = sum_out[kept], cut[kept]
        return added

    def _take_in(self, u: int, free: _Free) -> NDArray[np.int64]:
        """Take ``u`` into the rows that are free to, in place; those of them that do not go on."""
        word, bit = u // 64, np.uint64(1 << (u % 64))
        begun = free.touched_out & ~free.touched_in & self._touched_by[u]
        cut = free.cut + self._cut_of(begun)[:, 0]
        sum_in = free.sum_in + self._weights[:, u]
        which = free.which
        self.rows.inside[which, word] |= bit
        self.rows.touched_in[which] = free.touched_in | self._touched_by[u]
        self.rows.sum_in[which], self.rows.cut[which] = sum_in, cut
        kept = self._conditions.some(sum_in, free.sum_out, cut)
        complete = kept & self._is_complete(free.outside[:, word:], word)
        self._finish(which[complete])
        return which[~kept | complete]

    def _is_complete(self, outside: Words, word: int) -> Flags:
        """Where all units still to be decided are out; ``outside`` from their first ``word`` on."""
        rest = self._rest[word:]
        complete: Flags = (outside & rest == rest).all(axis=1)
        return complete

    def _finish(self, which: NDArray[np.int64]) -> None:
        if len(which):
            self.done.append(self.rows.inside[which])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Free:
    """The rows in which a unit is not decided yet, as they were before."""

    which: NDArray[np.int64]
    outside: Words
    touched_in: Words
    touched_out: Words
    sum_in: Vector
    sum_out: Vector
    cut: Vector


class _Undecided:
    """Partly decided downsets: units in and out, the values that these touch, and their sums."""

    def __init__(
        self,
        unit_words: int,
        value_words: int,
        columns: int,
        words: Words | None = None,
        sums: Vector | None = None,
    ) -> None:
        self._shape = unit_words, value_words, columns
        self._words = (
            np.zeros((1, 2 * (unit_words + value_words)), np.uint64) if words is None else words
        )
        self._sums = np.zeros((1, 2 * columns + 1)) if sums is None else sums
        self._count = len(self._words)

    def __len__(self) -> int:
        return self._count

    @property
    def inside(self) -> Words:
        return self._words[: self._count, : self._shape[0]]

    @property
    def outside(self) -> Words:
        return self._words[: self._count, self._shape[0] : 2 * self._shape[0]]

    @property
    def touched_in(self) -> Words:
        first = 2 * self._shape[0]
        return self._words[: self._count, first : first + self._shape[1]]

    @property
    def touched_out(self) -> Words:
        return self._words[: self._count, -self._shape[1] :]

    @property
    def sum_in(self) -> Vector:
        return self._sums[: self._count, : self._shape[2]]

    @property
    def sum_out(self) -> Vector:
        return self._sums[: self._count, self._shape[2] : -1]

    @property
    def cut(self) -> Vector:
        return self._sums[: self._count, -1]

    def copy(self, which: NDArray[np.int64]) -> _Undecided:
        return _Undecided(*self._shape, self._words[which], self._sums[which])

    def replace(self, removed: NDArray[np.int64], added: _Undecided) -> None:
        """Take rows out and others in; nothing else moves but what fills the holes."""
        common = min(len(removed), len(added))
        self._put(removed[:common], added, slice(common))
        if common < len(added):
            count = self._count + len(added) - common
            if count > len(self._words):
                room = ((0, max(count, 2 * self._count) - self._count), (0, 0))
                self._words = np.pad(self._words[: self._count], room)
                self._sums = np.pad(self._sums[: self._count], room)
            self._put(slice(self._count, count), added, slice(common, None))
            self._count = count
        elif common < len(removed):
            holes = removed[common:]
            count = self._count - len(holes)
            last = np.ones(self._count - count, dtype=bool)
            last[holes[holes >= count] - count] = False
            filling = np.flatnonzero(last) + count
            self._words[holes[holes < count]] = self._words[filling]
            self._sums[holes[holes < count]] = self._sums[filling]
            self._count = count

    def _put(self, at: NDArray[np.int64] | slice, added: _Undecided, which: slice) -> None:
        self._words[at] = added._words[which]
        self._sums[at] = added._sums[which]


def _with_later(lattice: Lattice, rows: Words) -> Words:
    """Per unit its row of ``rows``, with those of all units that follow it."""
    found = rows.copy()
    for u in reversed(range(lattice.num_units)):
        for reader in lattice.succs[u]:
            found[u] |= found[reader]
    return found
