"""Show a plan, or a simulation of it, as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from placer.plan.types import Plan
from placer.report.view import View, view

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

_TRANSFERS_SHOWN = 6
_STYLES = {"good": "bold green", "slow": "bold yellow", "bad": "bold red"}


def plan_table(plan: Plan) -> RenderableType:
    """``plan`` for ``rich``: stages, devices, transfers, notes, and whether it fits."""
    return Group(*_plan(view(plan)))


def simulation_table(plan: Plan, report: SimulationReport) -> RenderableType:
    """What devices need in a simulation of ``plan``, their largest tensors, and whether it fits."""
    return Group(*_simulation(view(plan, report)))


def _plan(shown: View) -> Iterator[RenderableType]:
    yield _Headline(shown.headline)
    for table in (shown.stages, shown.devices):
        yield from ("", table)
    yield Text(f"\n{shown.crossing}")
    if rows := shown.transfers.rows:
        yield replace(shown.transfers, rows=rows[:_TRANSFERS_SHOWN])
        if len(rows) > _TRANSFERS_SHOWN:
            yield f"… and {len(rows) - _TRANSFERS_SHOWN} smaller"
        yield ""
    yield from _verdict(shown)


class _Headline:
    """Facts in a line, or in several, each of them in one line."""

    def __init__(self, facts: Sequence[str]) -> None:
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = ""
        for fact in self._facts:
            longer = f"{line} · {fact}" if line else fact
            if line and cell_len(longer) > options.max_width:
                yield Text(line, style="bold")
                longer = fact
            line = longer
        yield Text(line, style="bold")


def _simulation(shown: View) -> Iterator[RenderableType]:
    yield shown.devices
    for title, tensors in shown.largest.items():
        yield from (Text(f"\n{title}"), tensors)
    yield ""
    yield from _verdict(shown)


def _verdict(shown: View) -> Iterator[RenderableType]:
    """The notes, and whether it fits."""
    for note in shown.notes:
        yield Text(f"note: {note}", style="dim")
    for line in shown.verdict:
        yield Text(line, style=_STYLES[shown.state])
