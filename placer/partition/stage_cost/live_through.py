"""Finds the values that a stage keeps on its device for later stages, on the same or on other devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable

Span = tuple[int, int]  # a stage, as the indices of the cuts where it begins and ends
Flags = NDArray[np.bool_]


class LiveThrough:
    """The results that later stages read, and the storages that they are views of.

    A result keeps its whole storage alive. For each node, ``cell_of`` has the index of the last cut before
    it.
    """

    def __init__(self, costs: CostTable, cell_of: NDArray[np.int64]) -> None:
        made: list[int] = []
        reads: list[tuple[int, int]] = []  # (result, cell in which it is read)
        # (result, its storage, bytes of the storage that a copy of the result takes)
        views: list[tuple[int, int, float]] = []
        numbers: dict[int, int] = {}
        for node, stored_in in enumerate(costs.results):
            cells = {int(cell) for cell in cell_of[list(costs.readers[node])]}
            later = [(len(made), cell) for cell in cells if cell > cell_of[node]]
            if not later:
                continue
            reads += later
            for value in stored_in:
                nbytes = costs.nodes[node].output_nbytes if len(stored_in) == 1 else 0
                views.append((len(made), numbers.setdefault(value, len(numbers)), nbytes))
            made.append(int(cell_of[node]))
        savers = [(i, int(cell_of[s])) for v, i in numbers.items() for s in costs.values[v].savers]
        self._made = np.array(made, dtype=np.int64)
        self._reads = np.array(reads, dtype=np.int64).reshape(-1, 2).T
        columns = np.array(views, dtype=float).reshape(-1, 3).T
        self._result, self._storage = columns[:2].astype(np.int64)
        self._copied = columns[2]
        self._savers = np.array(savers, dtype=np.int64).reshape(-1, 2).T
        self._nbytes = np.array([costs.values[value].nbytes for value in numbers], dtype=float)
        # Caches, because a search asks for the same stages many times.
        self._unsaved_at: dict[tuple[Span, int], float] = {}
        self._saved_in: dict[Span, Flags] = {}
        self._made_in: dict[Span, Flags] = {}
        self._read_in: dict[tuple[int, int | None], Flags] = {}

    def unsaved(self, home: Span, later: int) -> float:
        """Bytes that stage ``home`` does not save, but keeps for readers from cut ``later`` on."""
        known = self._unsaved_at.get((home, later))
        if known is None:
            kept = self._storages(self._read([home], later, None)) & ~self._saved(home)
            known = self._unsaved_at[home, later] = float(self._nbytes[kept].sum())
        return known

    def beside_parts(self, before: Sequence[Span], stage: Span) -> tuple[float, float]:
        """Bytes that ``stage`` keeps of the storages of ``before``, beyond the results that it reads.

        All stages are on one device. The costs of a stage assume that the results it reads are copies of
        their own size, but on the same device they are views that keep their whole storages alive. Returns
        the bytes during the forward of ``stage``, and the bytes that it saves until its backward.
        """
        read = self._read(before, *stage)
        at = read[self._result]
        if not at.any():
            return 0.0, 0.0
        storages = self._storage[at]
        parts = np.bincount(storages, weights=self._copied[at], minlength=len(self._nbytes))
        whole = np.zeros(len(self._nbytes), dtype=bool)
        whole[storages] = True
        for home in before:
            whole &= ~self._saved(home)
        rest = np.where(whole, np.maximum(self._nbytes - parts, 0.0), 0.0)
        return float(rest.sum()), float(rest[self._saved(stage)].sum())

    def _read(self, homes: Sequence[Span], begin: int, end: int | None) -> Flags:
        """The results of the stages ``homes`` that are read between cuts ``begin`` and ``end``."""
        found = np.zeros(len(self._made), dtype=bool)
        for home in homes:
            found |= self._made_by(home)
        found &= self._read_from(begin, end)
        return found

    def _made_by(self, stage: Span) -> Flags:
        known = self._made_in.get(stage)
        if known is None:
            known = (self._made >= stage[0]) & (self._made < stage[1])
            self._made_in[stage] = known
        return known

    def _read_from(self, begin: int, end: int | None) -> Flags:
        known = self._read_in.get((begin, end))
        if known is None:
            result, at = self._reads
            known = np.zeros(len(self._made), dtype=bool)
            known[result[(at >= begin) & (at < (np.inf if end is None else end))]] = True
            self._read_in[begin, end] = known
        return known

    def _storages(self, results: Flags) -> Flags:
        found = np.zeros(len(self._nbytes), dtype=bool)
        found[self._storage[results[self._result]]] = True
        return found

    def _saved(self, stage: Span) -> Flags:
        known = self._saved_in.get(stage)
        if known is None:
            storage, at = self._savers
            known = np.zeros(len(self._nbytes), dtype=bool)
            known[storage[(at >= stage[0]) & (at < stage[1])]] = True
            self._saved_in[stage] = known
        return known
