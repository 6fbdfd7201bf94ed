"""Families of downsets for the dynamic program: chains, beams, and all that a bound leaves alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.partition.lattice import (
    Flags,
    Lattice,
    WeightLookup,
    Words,
    bit_row,
    num_words,
    pack,
)
from placer.partition.problem import Vector

_STEP, _UNDECIDED = 1e5, 400.0  # nanoseconds for deciding a unit, and for each downset then
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
    sums = [WeightLookup(w) for w in weights]
    cut_of = WeightLookup(window.cut_nbytes)
    after = _descendants(lattice)
    touched_by = np.array([bit_row(v, m) for v in lattice.values_of])
    touched_after = touched_by.copy()
    for u in reversed(range(n)):
        for s in lattice.succs[u]:
            touched_after[u] |= touched_after[s]
    inside = np.zeros((1, num_words(n)), dtype=np.uint64)
    outside = inside.copy()
    touched_in = np.zeros((1, num_words(m)), dtype=np.uint64)
    touched_out = touched_in.copy()
    sum_in, sum_out = np.zeros((1, len(weights))), np.zeros((1, len(weights)))
    done = [bit_row((), n)[None], bit_row(range(n), n)[None]]
    rest = bit_row(range(n), n)
    for u in range(n):
        word, bit = u // 64, np.uint64(1 << (u % 64))
        rest = rest & ~bit_row([u], n)
        free = np.flatnonzero((outside[:, word] & bit) == 0)
        work.take(_STEP + (_UNDECIDED + n + m) * len(free))
        out_rows = outside[free] | after[u]
        fresh = after[u] & ~outside[free]
        out_sums = sum_out[free]
        for column, lookup in enumerate(sums):
            out_sums[:, column] += lookup(fresh)
        out_touched = touched_out[free] | touched_after[u]
        out_alive = window.some(sum_in[free], out_sums, cut_of(touched_in[free] & out_touched))
        # In place: the undecided rows take the unit in; then those that leave it out are added.
        taken = free[out_alive]
        added = (
            inside[taken],
            out_rows[out_alive],
            touched_in[taken],
            out_touched[out_alive],
            sum_in[taken],
            out_sums[out_alive],
        )
        inside[free, word] |= bit
        touched_in[free] |= touched_by[u]
        sum_in[free] += weights[:, u]
        in_alive = window.some(
            sum_in[free], sum_out[free], cut_of(touched_in[free] & touched_out[free])
        )
        complete = ((added[1] & rest) == rest).all(axis=1)
        if complete.any():
            done.append(added[0][complete])
        ended = free[in_alive][((outside[free[in_alive]] & rest) == rest).all(axis=1)]
        if len(ended):
            done.append(inside[ended])
        keep = np.ones(len(inside), dtype=bool)
        keep[free[~in_alive]] = False
        keep[ended] = False
        parts = (inside, outside, touched_in, touched_out, sum_in, sum_out)
        if keep.all() and not len(taken):
            continue
        inside, outside, touched_in, touched_out, sum_in, sum_out = (
            np.concatenate([part[keep], extra[~complete]])
            for part, extra in zip(parts, added, strict=True)
        )
        if len(inside) > most or sum(map(len, done)) > most or work.is_spent():
            return None
        if not len(inside):
            break
    return distinct(np.concatenate(done))


def _descendants(lattice: Lattice) -> Words:
    n = lattice.num_units
    after = np.array([bit_row([u], n) for u in range(n)])
    for u in reversed(range(n)):
        for s in lattice.succs[u]:
            after[u] |= after[s]
    return after
