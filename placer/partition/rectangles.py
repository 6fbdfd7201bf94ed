"""Sums of constants over rectangles of a table; rows are starts of stages, columns positions of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

NEVER = 2**40  # a position after all others


class Rectangles:
    """A sum of constants, each on a range of starts and a range of columns."""

    def __init__(self) -> None:
        self._added: list[tuple[int, int, int, int, float]] = []

    def add(self, first: int, last: int, column: int, value: float, *, until: int = NEVER) -> None:
        """Add ``value`` to columns column … until - 1 of stages that start at first … last."""
        self._added.append((first, last, column, until, value))

    def add_if_any_inside(self, positions: Sequence[int], value: float, *, after: int = -1) -> None:
        """Add ``value`` if any of ``positions`` is in [start, column], for starts after ``after``."""
        previous = after
        for position in positions:
            if position > previous:
                self._added.append((previous + 1, position, position, NEVER, value))
                previous = position

    def with_more(self, other: Rectangles) -> Rectangles:
        """The sum of both; neither is changed."""
        found = Rectangles()
        found._added = self._added + other._added
        return found

    def steps(self, row_of: NDArray[np.int64], column_of: NDArray[np.int64]) -> Table:
        """The difference array of the table; its cumulative sum over rows and columns is the table.

        For each position, ``row_of`` has the number of starts before it, and ``column_of`` the first column
        that includes it. The last row and the last column are outside the table.
        """
        rows, columns = int(row_of[-1]) + 1, int(column_of[-1]) + 1
        if not self._added:
            return np.zeros((rows, columns))
        added = np.array(self._added)
        last_row, last_column = len(row_of) - 1, len(column_of) - 1
        first, last, column, until = added[:, :4].astype(np.int64).T
        top, bottom = row_of[np.clip(first, 0, last_row)], row_of[np.clip(last + 1, 0, last_row)]
        begin, end = (
            column_of[np.minimum(column, last_column)],
            column_of[np.minimum(until, last_column)],
        )
        inside = (top < bottom) & (begin < end)
        top, bottom = top[inside] * columns, bottom[inside] * columns
        begin, end, value = begin[inside], end[inside], added[inside, 4]
        at = np.concatenate([top + begin, bottom + begin, top + end, bottom + end])
        change = np.concatenate([value, -value, -value, value])
        found: Table = np.bincount(at, weights=change, minlength=rows * columns).astype(
            float, copy=False
        )
        return found.reshape(rows, columns)
