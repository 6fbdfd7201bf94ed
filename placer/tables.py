"""Tables as plain data, and how they are shown in terminals and pipes: no word and no unit is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import rich.table
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GAP = 2  # spaces between columns
_STYLES = {"good": "green", "bad": "bold red", "": ""}


class Cell(NamedTuple):
    """The text of a cell, and whether that is good or bad news."""

    text: str
    state: Literal["good", "bad", ""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts below ``headers``, which differ from each other.

    Columns of ``names`` and ``words`` stand on the left, all others have numbers. Where the console is
    narrow, ``words`` are broken between words; where that is not enough, columns are left out: the
    ``optional`` ones, in this order. A ``footer`` has a text for every column.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    names: Sequence[str] = ()
    words: Sequence[str] = ()
    optional: Sequence[str] = ()
    footer: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self.headers)
        for header in self.optional:
            if self._width(shown) > options.max_width and header in shown:
                shown.remove(header)
        fits = (
            self._width(shown) <= options.max_width
        )  # else words are broken, but no letter is lost
        widths = self._widths(shown, options.max_width)
        table = rich.table.Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),
            show_footer=bool(self.footer),
        )
        for header in shown:
            table.add_column(
                header,
                justify="right" if self.kind(header) == "number" else "left",
                overflow="fold",
                width=widths[header] if fits else None,
                footer=self.footer[self._place(header)] if self.footer else "",
            )
        for row in self.rows:
            cells = (row[self._place(header)] for header in shown)
            table.add_row(*(_as_text(cell) for cell in cells))
        yield table

    def kind(self, header: str) -> Literal["name", "words", "number"]:
        """What the column has."""
        if header in self.words:
            return "words"
        return "name" if header in self.names else "number"

    def _place(self, header: str) -> int:
        return self.headers.index(header)

    def _size(self, header: str, *, broken: bool) -> int:
        """The width of the longest text of a column, or of its longest word."""
        place = self._place(header)
        texts = [
            header,
            *(_as_text(row[place]).plain for row in self.rows),
            *self.footer[place:][:1],
        ]
        pieces = [piece for text in texts for piece in (text.split() if broken else [text])]
        return max(map(cell_len, pieces), default=0)

    def _width(self, shown: Sequence[str]) -> int:
        """The least width of the table with the columns ``shown``."""
        least = (self._size(h, broken=h in self.words) for h in shown)
        return sum(least) + _GAP * (len(shown) - 1)

    def _widths(self, shown: Sequence[str], most: int) -> dict[str, int]:
        """The widths of the columns, within ``most``: words are broken, in the widest column first."""
        widths = {header: self._size(header, broken=False) for header in shown}
        words = [header for header in shown if header in self.words]
        for header in sorted(words, key=lambda header: -widths[header]):
            excess = sum(widths.values()) + _GAP * (len(shown) - 1) - most
            least = self._size(header, broken=True)
            widths[header] = max(least, widths[header] - max(0, excess))
        return widths


def _as_text(cell: str | Cell) -> Text:
    """The cell for rich, without markup."""
    return Text(cell.text, style=_STYLES[cell.state]) if isinstance(cell, Cell) else Text(cell)
