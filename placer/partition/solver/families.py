"""Makes families of downsets for a first answer: the prefixes of orders, and results of a beam search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.lattice import Flags, Lattice, Words, num_words, pack
from placer.partition.solver.problem import Vector

_BEAM_SEED = 20_260_101  # of the random numbers that name sets of units


def chain_rows(lattice: Lattice, order: Sequence[int] | NDArray[np.int64]) -> Words:
    """The prefixes of a topological order, including the empty and the full one."""
    n = lattice.num_units
    flags = np.zeros((n + 1, num_words(n) * 64), dtype=bool)
    flags[:, np.asarray(order, dtype=np.int64)] = np.tri(n + 1, n, -1, dtype=bool)
    return pack(flags)


def beam_rows(lattice: Lattice, width: int) -> Words:
    """Downsets whose boundaries few bytes cross: ``width`` of every size, by beam search from both ends.

    Each step extends every downset by every ready unit. The bytes of a value cross if it has units on both
    sides. A heuristic; O(width * (n * ready + uses)).
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
    """All sets that the beam search keeps, grown from the empty one along ``succs``."""
    growth = _Growth(lattice, preds, succs)
    level = [growth.start()]
    found = [level[0].members]
    for _ in range(lattice.num_units):
        offers = [
            (crossing, unit, index, name)
            for index, grown in enumerate(level)
            for crossing, unit, name in growth.offers(grown, width)
        ]
        following: dict[int, _Grown] = {}
        for crossing, unit, index, name in sorted(offers):
            if name not in following:
                following[name] = growth.join(level[index], unit, crossing, name)
            if len(following) == width:
                break
        level = list(following.values())
        found += [grown.members for grown in level]
    return np.array(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Grown:
    """A set of units, with the sums that are needed to extend it by one unit."""

    crossing: float  # bytes of the values with units on both sides
    name: int  # a hash, the same for the same units
    members: Flags
    counts: NDArray[np.int64]  # for each value, the number of its units that are members
    gain: Vector  # for each unit, the change of the crossing bytes if it joins
    missing: NDArray[np.int64]  # for each unit, the number of its predecessors that are not members


class _Growth:
    """Extends sets by a unit."""

    def __init__(
        self, lattice: Lattice, preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]]
    ) -> None:
        self._lattice, self._preds, self._succs = lattice, preds, succs
        self._members = [np.asarray(units) for units in lattice.values]
        self._names = np.random.default_rng(_BEAM_SEED).integers(0, 2**63, lattice.num_units)

    def start(self) -> _Grown:
        """The empty set."""
        n = self._lattice.num_units
        gain = np.zeros(n)
        for nbytes, units in zip(self._lattice.value_nbytes, self._members, strict=True):
            gain[units] += nbytes
        return _Grown(
            crossing=0.0,
            name=0,
            members=np.zeros(n, dtype=bool),
            counts=np.zeros(len(self._members), dtype=np.int64),
            gain=gain,
            missing=np.array([len(p) for p in self._preds], dtype=np.int64),
        )

    def offers(self, grown: _Grown, width: int) -> Iterator[tuple[float, int, int]]:
        """The crossing bytes, new unit and name of the ``width`` best sets with one more unit."""
        ready = np.flatnonzero((grown.missing == 0) & ~grown.members)
        crossing = grown.crossing + grown.gain[ready]
        if len(ready) > width:
            most = np.partition(crossing, width - 1)[width - 1]
            ready, crossing = ready[crossing <= most], crossing[crossing <= most]
        names = self._names[ready] ^ grown.name
        return zip(crossing.tolist(), ready.tolist(), names.tolist(), strict=True)

    def join(self, grown: _Grown, unit: int, crossing: float, name: int) -> _Grown:
        """The set extended by ``unit``."""
        members, counts = grown.members.copy(), grown.counts.copy()
        gain, missing = grown.gain.copy(), grown.missing.copy()
        members[unit] = True
        for e in self._lattice.values_of[unit]:
            counts[e] += 1
            sharing, nbytes = self._members[e], self._lattice.value_nbytes[e]
            if counts[e] == 1:  # it crosses already when the next one joins
                gain[sharing] -= nbytes
            if counts[e] == len(sharing) - 1:  # it no longer crosses when the last one does
                gain[sharing] -= nbytes
        for reader in self._succs[unit]:
            missing[reader] -= 1
        return _Grown(
            crossing=crossing, name=name, members=members, counts=counts, gain=gain, missing=missing
        )


def distinct(rows: Words) -> Words:
    """The rows without duplicates, sorted by size (so that subsets come first), then by their bits."""
    size = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
    keys = np.lexsort((*rows.T, size))
    rows = rows[keys]
    new = np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])
    kept: Words = rows[new]
    return kept
