"""Tables as plain data, and how they are shown in terminals and pipes: no word and no unit is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import rich.table
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from placer.quantities import Units, common_unit, format_in

_GAP = 2  # spaces between columns
_STYLES = {"good": "green", "bad": "bold red", "": ""}


class Cell(NamedTuple):
    """What a cell has, and whether that is good or bad news."""

    value: str | float
    state: Literal["good", "bad", ""] = ""


class _Column(NamedTuple):
    """The texts of a column: its header and unit in lines, its cells, and its footer."""

    head: str
    cells: Sequence[str]
    foot: str
    breaks: bool  # may its texts be broken between words?

    @property
    def width(self) -> int:
        """The width of the longest text."""
        return max(map(cell_len, (*self.head.split("\n"), *self.cells, self.foot)))

    @property
    def least_width(self) -> int:
        """The width of the longest text that is not broken."""
        if not self.breaks:
            return self.width
        texts = (self.head, *self.cells, self.foot)
        return max((cell_len(word) for text in texts for word in text.split()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts and numbers below ``headers``, which differ from each other.

    Columns of ``names`` and ``words`` stand on the left, all others have numbers. The numbers of a column in
    ``units`` are in one unit, which stands below its header. Where the console is narrow, ``words`` are
    broken between words; where that is not enough, columns are left out: the ``optional`` ones, in this
    order. What is too wide even then is wider than the console, because no word is ever broken. A ``footer``
    has something for every column.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str | float | Cell]]
    names: Sequence[str] = ()
    words: Sequence[str] = ()
    optional: Sequence[str] = ()
    footer: Sequence[str | float] = ()
    units: Mapping[str, Units] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = {header: self._column(place) for place, header in enumerate(self.headers)}
        for header in self.optional:
            least = sum(c.least_width for c in columns.values()) + _GAP * (len(columns) - 1)
            if least > options.max_width:
                columns.pop(header, None)
        widths = _widths(columns, options.max_width)
        table = rich.table.Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),
            show_footer=bool(self.footer),
            width=sum(widths.values()) + _GAP * (len(widths) - 1),
        )
        for header, column in columns.items():
            left = header in self.words or header in self.names
            table.add_column(
                column.head,
                justify="left" if left else "right",
                width=widths[header],
                footer=column.foot,
            )
        for number, row in enumerate(self.rows):
            states = dict(zip(self.headers, map(_state, row), strict=True))
            table.add_row(
                *(Text(c.cells[number], style=_STYLES[states[h]]) for h, c in columns.items())
            )
        yield table

    def _column(self, place: int) -> _Column:
        header = self.headers[place]
        values = [_value(row[place]) for row in self.rows]
        foot = self.footer[place] if self.footer else ""
        numbers = [value for value in (*values, foot) if not isinstance(value, str)]
        unit, factor = "", 1.0
        if header in self.units and numbers:
            unit, factor = common_unit(numbers, self.units[header])

        def text(value: str | float) -> str:
            return value if isinstance(value, str) else format_in(value, factor)

        breaks = header in self.words
        head = f"{header}\n{unit}" if unit else header
        return _Column(head, [text(value) for value in values], text(foot), breaks)


def _widths(columns: Mapping[str, _Column], most: int) -> dict[str, int]:
    """The widths of the columns, if possible within ``most``: the widest that can be broken gives way."""
    widths = {header: column.width for header, column in columns.items()}
    for _ in range(sum(widths.values()) + _GAP * (len(widths) - 1) - most):
        broken = [h for h, column in columns.items() if widths[h] > column.least_width]
        if broken:
            widths[max(broken, key=lambda header: widths[header])] -= 1
    return widths


def _value(cell: str | float | Cell) -> str | float:
    return cell.value if isinstance(cell, Cell) else cell


def _state(cell: str | float | Cell) -> Literal["good", "bad", ""]:
    return cell.state if isinstance(cell, Cell) else ""
