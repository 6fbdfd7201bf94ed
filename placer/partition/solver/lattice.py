"""Represents downsets as bitsets: rows of 64-bit words in numpy arrays.

Bit u of a row is set if unit u, numbered along a topological order, is in the downset. Sets of values are
rows of words, too. Sums of weights over a set are looked up byte by byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.problem import PartitionProblem, Vector

Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]
_FEW_ROWS = 100  # up to so many rows a matrix product is faster than looking up each byte


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lattice:
    """``problem`` with its units renumbered along ``order``.

    ``values[e]`` are the units of value e. Inputs of the model are in ``external`` instead. Values with a
    single unit, which never cross a boundary, are left out.
    """

    problem: PartitionProblem
    order: NDArray[np.int64]  # the unit of the problem at each position
    preds: tuple[tuple[int, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]
    value_nbytes: Vector
    values_of: tuple[tuple[int, ...], ...]  # for each unit, its values
    external: tuple[tuple[int, ...], ...]
    external_nbytes: Vector
    standalone: Flags  # for each unit, whether it can be the only one on a stage

    @property
    def num_units(self) -> int:
        return len(self.order)


def build_lattice(problem: PartitionProblem, order: Sequence[int]) -> Lattice:
    """The lattice of ``problem`` along ``order``, a topological order of its units."""
    n = len(order)
    place = np.zeros(problem.num_units, dtype=np.int64)
    place[np.asarray(order, dtype=np.int64)] = np.arange(n)
    preds: list[set[int]] = [set() for _ in range(n)]
    succs: list[set[int]] = [set() for _ in range(n)]
    for a, b in problem.edges:
        preds[place[b]].add(int(place[a]))
        succs[place[a]].add(int(place[b]))
    paid = _merged_values(problem, place, external=False)
    outer = _merged_values(problem, place, external=True)
    values_of: list[list[int]] = [[] for _ in range(n)]
    for e, units in enumerate(paid):
        for u in units:
            values_of[u].append(e)
    standalone = np.ones(n, dtype=bool)
    standalone[[int(place[u]) for u in sorted(problem.auxiliary)]] = False
    return Lattice(
        problem=problem,
        order=np.asarray(order, dtype=np.int64),
        preds=tuple(tuple(sorted(p)) for p in preds),
        succs=tuple(tuple(sorted(s)) for s in succs),
        values=tuple(paid),
        value_nbytes=np.array(list(paid.values())),
        values_of=tuple(map(tuple, values_of)),
        external=tuple(outer),
        external_nbytes=np.array(list(outer.values())),
        standalone=standalone,
    )


def _merged_values(
    problem: PartitionProblem, place: NDArray[np.int64], *, external: bool
) -> dict[tuple[int, ...], float]:
    """The bytes of the values that each set of units (positions) shares, sorted by units."""
    merged: dict[tuple[int, ...], float] = {}
    for value in problem.values:
        if value.external == external and value.nbytes:
            units = tuple(sorted({int(place[u]) for u in value.units}))
            if external or len(units) > 1:
                merged[units] = merged.get(units, 0.0) + value.nbytes
    return dict(sorted(merged.items()))


def num_words(bits: int) -> int:
    """The number of 64-bit words for ``bits`` bits; at least one."""
    return max(1, -(-bits // 64))


def pack(flags: Flags) -> Words:
    """Rows of booleans (a multiple of 64 columns) as rows of words."""
    packed = np.packbits(flags, axis=1, bitorder="little")
    rows: Words = packed.view("<u8").astype(np.uint64, copy=False)
    return rows


def unpack(rows: Words, bits: int) -> NDArray[np.uint8]:
    """Rows of words as 0/1 columns."""
    packed = np.ascontiguousarray(rows).astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(packed, axis=1, count=bits, bitorder="little")


class BitSums:
    """Sums of several weights over bitsets, eight bits at a time, skipping bytes that are 0 in all rows."""

    def __init__(self, weights: Vector) -> None:
        """``weights[b, c]``: weight c of bit b."""
        bits, columns = weights.shape
        self._weights = weights
        padded = np.zeros((num_words(bits) * 64, columns))  # no columns for a single stage
        padded[:bits] = weights
        by_byte = padded.reshape(num_words(bits) * 8, 8, columns)
        patterns = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._table = np.einsum("pb,wbc->wpc", patterns.astype(np.float64), by_byte)

    def __call__(self, rows: Words) -> Vector:
        """``[i, c]``: the sum of weight c over row i."""
        if len(rows) < _FEW_ROWS:
            found: Vector = unpack(rows, len(self._weights)).astype(np.float64) @ self._weights
            return found
        total = np.zeros((len(rows), self._table.shape[2]))
        packed = np.ascontiguousarray(rows).astype("<u8", copy=False).view(np.uint8)
        for column in np.flatnonzero(np.bitwise_or.reduce(packed, axis=0)):
            some = np.flatnonzero(packed[:, column])
            total[some] += self._table[column][packed[some, column]]
        return total


def topological_order(
    preds: Sequence[Iterable[int]], succs: Sequence[Iterable[int]], priority: Sequence[float]
) -> list[int]:
    """Kahn's algorithm; the ready unit with the least priority (then number) is next. O(E + n log n)."""
    missing = [len(set(p)) for p in preds]
    ready = [(priority[u], u) for u, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for reader in succs[unit]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (priority[reader], reader))
    return order
