"""Tables for terminals and pipes that never cut a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table

_WIDE = 10_000  # columns; more than any table has


class _Column(NamedTuple):
    header: str
    wraps: bool
    options: dict[str, Any]


class FittedTable:
    """A table with a line below the headers and no frame, at most as wide as the console.

    Where the console is too narrow for it, columns are left out: those with the headers ``optional``, in this
    order. ``options`` are those of `rich.table.Table`.
    """

    def __init__(self, *, optional: Sequence[str] = (), **options: Any) -> None:
        self._optional, self._options = optional, options
        self._columns: list[_Column] = []
        self._rows: list[tuple[RenderableType, ...]] = []

    def add_column(self, header: str, *, wraps: bool = False, **options: Any) -> None:
        """Add a column; if it ``wraps``, its cells are broken between words where the console is narrow."""
        self._columns.append(_Column(header, wraps, options))

    def add_row(self, *cells: RenderableType) -> None:
        """Add a row with a cell for every column."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(range(len(self._columns)))
        wide = options.update(max_width=_WIDE)
        for header in ("", *self._optional):
            kept = [i for i in kept if not header or self._columns[i].header != header]
            table = self._table(kept, [self._least(i, console, wide) for i in kept])
            if Measurement.get(console, wide, table).minimum <= options.max_width:
                yield table
                return
        yield self._table(kept, None)  # a word is broken, but no letter is lost

    def _table(self, kept: Sequence[int], least: Sequence[int] | None) -> Table:
        """The table with the columns ``kept``, at least so wide; if that is None, all of them wrap."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, **self._options)
        for place, i in enumerate(kept):
            header, wraps, options = self._columns[i]
            table.add_column(
                header,
                overflow="fold",
                no_wrap=not wraps and least is not None,
                min_width=None if least is None else least[place],
                **options,
            )
        for row in self._rows:
            table.add_row(*(row[i] for i in kept))
        return table

    def _least(self, index: int, console: Console, options: ConsoleOptions) -> int:
        """The width that a column needs, without padding."""
        header, wraps, given = self._columns[index]
        cells = header, given.get("footer", ""), *(row[index] for row in self._rows)
        sizes = [Measurement.get(console, options, cell) for cell in cells]
        return max(size.minimum if wraps else size.maximum for size in sizes)
