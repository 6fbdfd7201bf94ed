"""Families of downsets for the dynamic program: chains, beams, and all that a bound leaves alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.lattice import (
    BitSums,
    Flags,
    Lattice,
    Words,
    bit_row,
    num_words,
    pack,
)
from placer.partition.solver.problem import Vector

# Nanoseconds for deciding a unit, for each downset then, and for each unit and value.
_STEP, _UNDECIDED, _PER_BIT = 1e5, 250.0, 0.5
_BEAM_SEED = 20_260_101  # of the random numbers that name sets of units


def chain_rows(lattice: Lattice, order: Sequence[int] | NDArray[np.int64]) -> Words:
    """The prefixes of a topological order, the empty and the full one included."""
    n = lattice.num_units
    flags = np.zeros((n + 1, num_words(n) * 64), dtype=bool)
    flags[:, np.asarray(order, dtype=np.int64)] = np.tri(n + 1, n, -1, dtype=bool)
    return pack(flags)


def beam_rows(lattice: Lattice, width: int) -> Words:
    """For every size the ``width`` downsets of least cut that the beam finds from either end.

    Each level extends every kept downset by every ready unit; O(width * (n * ready + uses)) and no
    guarantee. The cut counts the bytes of values with units on both sides.
    """
    n = lattice.num_units
    grown = _beam(lattice, lattice.preds, lattice.succs, width)
    shrunk = ~_beam(lattice, lattice.succs, lattice.preds, width)
    flags = np.concatenate([grown, shrunk])
    padded = np.zeros((len(flags), num_words(n) * 64), dtype=bool)
    padded[:, :n] = flags
    return distinct(pack(padded))


def _beam(
    lattice: Lattice, preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]], width: int
) -> Flags:
    n, m = lattice.num_units, len(lattice.values)
    nbytes = lattice.value_nbytes
    sizes = np.array([len(v) for v in lattice.values], dtype=np.int64)
    members = [np.asarray(v) for v in lattice.values]
    names = np.random.default_rng(_BEAM_SEED).integers(0, 2**63, n)
    gain = np.zeros(n)  # change of the cut when a unit joins
    for e, units in enumerate(members):
        gain[units] += nbytes[e]
    states = [
        (
            0.0,
            0,
            np.zeros(n, dtype=bool),
            np.zeros(m, dtype=np.int64),
            gain,
            np.array([len(p) for p in preds], dtype=np.int64),
        )
    ]
    found = [states[0][2]]
    for _ in range(n):
        offers: list[tuple[float, int, int, int]] = []
        for index, (cut, name, held, _, gain, waiting) in enumerate(states):
            ready = np.flatnonzero((waiting == 0) & ~held)
            costs = cut + gain[ready]
            if len(ready) > width:
                least = np.partition(costs, width - 1)[width - 1]
                ready, costs = ready[costs <= least], costs[costs <= least]
            offers += zip(
                costs.tolist(),
                ready.tolist(),
                [index] * len(ready),
                (names[ready] ^ name).tolist(),
                strict=True,
            )
        seen: set[int] = set()
        following = []
        for cut, unit, index, name in sorted(offers):
            if name in seen:
                continue
            seen.add(name)
            _, _, held, count, gain, waiting = states[index]
            held, count, gain, waiting = held.copy(), count.copy(), gain.copy(), waiting.copy()
            held[unit] = True
            for e in lattice.values_of[unit]:
                count[e] += 1
                if count[e] == 1:
                    gain[members[e]] -= nbytes[e]
                if count[e] == sizes[e] - 1:
                    gain[members[e]] -= nbytes[e]
            for reader in succs[unit]:
                waiting[reader] -= 1
            following.append((cut, name, held, count, gain, waiting))
            if len(following) == width:
                break
        states = following
        found += [state[2] for state in states]
    return np.array(found)


def distinct(rows: Words) -> Words:
    """The rows without duplicates, by size (so that subsets come first), then by their bits."""
    size = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
    keys = np.lexsort((*rows.T, size))
    rows = rows[keys]
    new = np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])
    kept: Words = rows[new]
    return kept


@dataclass(slots=True)
class Work:
    """What is left of the work that a proof may do, in estimated nanoseconds: no clock decides."""

    left: float = np.inf

    def is_spent(self) -> bool:
        return self.left <= 0

    def take(self, nanoseconds: float) -> None:
        self.left -= nanoseconds


class Window:
    """Which downsets can end stage q of a placement with all loads below a bound.

    With work w and cut c, a downset can only end stage q if w + c <= q * bound, for each crossing
    value is paid by some stage before the border, and likewise from the other side; the bytes held
    on either side fit into the budgets there. Where stages differ, the least cost of the stages on
    a side counts. The same conditions hold for partly decided downsets, with what is decided.
    """

    def __init__(self, lattice: Lattice, bound: float) -> None:
        slots, order = lattice.problem.slots, lattice.order
        self.cut_nbytes = lattice.value_nbytes.copy()
        self.columns: list[Vector] = []  # weights of units that are summed
        self._keys: dict[bytes, int] = {}
        self.inside: list[list[tuple[int, float, float]]] = []  # per q: column, cut factor, limit
        self.outside: list[list[tuple[int, float, float]]] = []
        for q in range(1, len(slots)):
            for conditions, side in ((self.inside, slots[:q]), (self.outside, slots[q:])):
                seconds = np.min([s.seconds[order] for s in side], axis=0)
                factor = min(s.seconds_per_byte for s in side)
                for i, f in enumerate(lattice.floats, lattice.num_paid):
                    # A side with units that it shares values with pays its seconds, or for a value;
                    # a border that parts them costs the cheapest value: the rest of that.
                    nbytes = float(lattice.value_nbytes[i])
                    least = min(*(s.seconds[f.unit] for s in side), factor * nbytes)
                    seconds[f.shared[0 if conditions is self.inside else -1]] += least
                    rest = nbytes - least / factor if factor else 0.0
                    self.cut_nbytes[i] = min(self.cut_nbytes[i], rest)
                entries = [(self._column(seconds), factor, len(side) * bound)]
                budgets = [s.budget for s in side if s.budget is not None]
                if len(budgets) == len(side):
                    first = conditions is self.inside
                    held = [s.nbytes_or_earlier if first else s.nbytes_or_later for s in side]
                    nbytes = np.min(held, axis=0)[order]
                    total = float(sum(budgets))
                    if nbytes.sum() > total:
                        entries.append((self._column(nbytes), 0.0, total * (1 + 1e-12)))
                foreign = _foreign(lattice, {s.device for s in side})
                if foreign.any():
                    entries.append((self._column(foreign), 0.0, 0.5))
                conditions.append(entries)
        self._pairs = list(zip(self.inside, self.outside, strict=True))

    def _column(self, weights: Vector) -> int:
        key = weights.tobytes()
        if key not in self._keys:
            self._keys[key] = len(self.columns)
            self.columns.append(weights)
        return self._keys[key]

    def open(self, q: int, inside: Vector, outside: Vector, cut: Vector) -> Flags:
        """Whether rows with these sums (a column for each of ``columns``) can end stage q >= 1."""
        first, second = self._pairs[q - 1]
        alive = np.ones(len(cut), dtype=bool)
        for sums, entries in ((inside, first), (outside, second)):
            for column, factor, limit in entries:
                alive &= sums[:, column] + factor * cut <= limit
        return alive

    def some(self, inside: Vector, outside: Vector, cut: Vector) -> Flags:
        """Whether rows can end any stage but the last."""
        alive = np.zeros(len(cut), dtype=bool)
        for q in range(1, len(self._pairs) + 1):
            alive |= self.open(q, inside, outside, cut)
        return alive


def _foreign(lattice: Lattice, devices: set[str]) -> Vector:
    pins = lattice.problem.pins
    return np.array([float(pins.get(int(u), None) not in {None, *devices}) for u in lattice.order])


def surviving_rows(
    lattice: Lattice, bound: float, *, most: int, work: Work | None = None
) -> Words | None:
    """Every downset that can be a border of a placement with all loads <= ``bound``.

    Units are decided in topological order, in or out (out with all that follows it), all partial
    decisions at once; those that `Window` closes are dropped. None when more than ``most`` partial
    decisions would be alive, or ``work`` is spent. The empty and the full set are in the answer.
    """
    work = work or Work()
    n, m = lattice.num_units, len(lattice.values)
    window = Window(lattice, bound)
    weights = np.array(window.columns).reshape(
        len(window.columns), n
    )  # columns x units; none for one stage
    sums_of, cut_of = BitSums(weights.T), BitSums(window.cut_nbytes[:, None])
    after = _descendants(lattice)
    after_sums = sums_of(after)
    touched_by = np.array([bit_row(v, m) for v in lattice.values_of])
    touched_after = touched_by.copy()
    for u in reversed(range(n)):
        for s in lattice.succs[u]:
            touched_after[u] |= touched_after[s]
    rows = _Undecided(num_words(n), num_words(m), len(weights))
    done = [bit_row((), n)[None], bit_row(range(n), n)[None]]
    rest = bit_row(range(n), n)
    for u in range(n):
        word, bit = u // 64, np.uint64(1 << (u % 64))
        rest = rest & ~bit_row([u], n)
        free = np.flatnonzero((rows.outside[:, word] & bit) == 0)
        work.take(_STEP + (_UNDECIDED + _PER_BIT * (n + m)) * len(free))
        outside, sum_in, sum_out = rows.outside[free], rows.sum_in[free], rows.sum_out[free]
        touched_in, touched_out = rows.touched_in[free], rows.touched_out[free]
        cut = rows.cut[free]
        # Left out, with all that follows.
        fresh = after[u] & ~outside
        out_sums = sum_out + after_sums[u]  # right where none of these was left out before
        some = np.flatnonzero((fresh != after[u]).any(axis=1))
        out_sums[some] = sum_out[some] + sums_of(fresh[some])
        out_cut = cut + cut_of(touched_in & ~touched_out & touched_after[u])[:, 0]
        taken = np.flatnonzero(window.some(sum_in, out_sums, out_cut))
        complete = ((outside[taken, word:] | after[u, word:]) & rest[word:] == rest[word:]).all(
            axis=1
        )
        if complete.any():
            done.append(rows.inside[free[taken[complete]]])
        taken = taken[~complete]
        added = rows.copy(free[taken])
        added.outside[:] |= after[u]
        added.touched_out[:] |= touched_after[u]
        added.sum_out[:], added.cut[:] = out_sums[taken], out_cut[taken]
        # Taken in.
        cut += cut_of(touched_out & ~touched_in & touched_by[u])[:, 0]
        sum_in += weights[:, u]
        rows.inside[free, word] |= bit
        rows.touched_in[free] = touched_in | touched_by[u]
        rows.sum_in[free], rows.cut[free] = sum_in, cut
        kept = window.some(sum_in, sum_out, cut)
        ended = kept & (outside[:, word:] & rest[word:] == rest[word:]).all(axis=1)
        if ended.any():
            done.append(rows.inside[free[ended]])
        rows.replace(free[~kept | ended], added)
        if len(rows) > most or sum(map(len, done)) > most or work.is_spent():
            return None
        if not len(rows):
            break
    return distinct(np.concatenate(done))


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


def _descendants(lattice: Lattice) -> Words:
    n = lattice.num_units
    after = np.array([bit_row([u], n) for u in range(n)])
    for u in reversed(range(n)):
        for s in lattice.succs[u]:
            after[u] |= after[s]
    return after
