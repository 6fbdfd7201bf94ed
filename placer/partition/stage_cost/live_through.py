"""Finds the values that a stage keeps on its device for later stages, on the same or on other devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable

Span = tuple[int, int]  # a stage, as the indices of the cuts where it begins and ends


class LiveThrough:
    """The results that later stages read, and the storages that they are views of.

    A result keeps its whole storage alive. For each node, ``cell_of`` has the index of the last cut before
    it.
    """

    def __init__(self, costs: CostTable, cell_of: NDArray[np.int64]) -> None:
        made: list[int] = []
        reads: list[tuple[int, int]] = []  # (result, cell in which it is read)
        views: list[tuple[int, int]] = []  # (result, its storage)
        numbers: dict[int, int] = {}
        for node, stored_in in enumerate(costs.results):
            cells = {int(cell) for cell in cell_of[list(costs.readers[node])]}
            later = [(len(made), cell) for cell in cells if cell > cell_of[node]]
            if not later:
                continue
            reads += later
            views += [(len(made), numbers.setdefault(value, len(numbers))) for value in stored_in]
            made.append(int(cell_of[node]))
        savers = [(i, int(cell_of[s])) for v, i in numbers.items() for s in costs.values[v].savers]
        self._made = np.array(made, dtype=np.int64)
        self._reads = np.array(reads, dtype=np.int64).reshape(-1, 2).T
        self._result, self._storage = np.array(views, dtype=np.int64).reshape(-1, 2).T
        self._savers = np.array(savers, dtype=np.int64).reshape(-1, 2).T
        self._nbytes = np.array([costs.values[value].nbytes for value in numbers], dtype=float)
        # A search asks for the same ones many times
        self._known: dict[tuple[Span, int], float] = {}

    def unsaved(self, home: Span, later: int) -> float:
        """Bytes that stage ``home`` does not save, but keeps for readers from cut ``later`` on."""
        known = self._known.get((home, later))
        if known is None:
            result, at = self._reads
            read = np.zeros(len(self._made), dtype=bool)
            read[result[at >= later]] = True
            read &= (self._made >= home[0]) & (self._made < home[1])
            kept = np.zeros(len(self._nbytes), dtype=bool)
            kept[self._storage[read[self._result]]] = True
            storage, at = self._savers
            kept[storage[(at >= home[0]) & (at < home[1])]] = False
            known = self._known[home, later] = float(self._nbytes[kept].sum())
        return known
