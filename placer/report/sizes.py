"""Show which sizes of an input fit, as a table in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from placer.quantities import BYTES, SECONDS
from placer.search.largest import SizeTried
from placer.tables import Cell, Table


def sizes_table(rows: Iterable[tuple[str, SizeTried]], header: str) -> Table:
    """A row for every size that was tried; a size that does not fit has a negative headroom."""
    cells = []
    for size, tried in rows:
        plan = tried.plan
        seconds = None if plan is None or not tried.fits else plan.step_seconds
        headroom = None if plan is None else plan.tightest.headroom
        cells.append(
            [
                size,
                tried.strategy,
                "-" if seconds is None else seconds,
                Cell("-" if headroom is None else headroom, "good" if tried.fits else "bad"),
            ]
        )
    return Table(
        headers=(header, "strategy", "step", "headroom"),
        rows=cells,
        names=(header,),
        words=("strategy",),
        units={"step": SECONDS, "headroom": BYTES},
    )
