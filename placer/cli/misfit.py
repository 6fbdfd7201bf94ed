"""Print which changes would make a placement fit that does not."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn

import typer
from rich.console import Console

from placer.cli.output import EXIT_NO_FIT, print_json
from placer.cli.progress import progress
from placer.errors import BudgetError
from placer.plan.check import host_error
from placer.plan.types import Plan
from placer.search.fewer import as_fast_with_fewer
from placer.search.remedies import (
    describe_fitting,
    describe_shortage,
    find_largest_node,
    lacks_room,
    memory_needed,
    misfit_error,
)
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec


def with_comparisons(plan: Plan, spec: PlacementSpec, make: JudgingPlanner) -> Plan:
    """``plan`` for ``spec`` with notes on what else would be faster, or have another verdict."""
    compared = (as_fast_with_fewer(spec, plan, make), make.elsewhere(spec, plan))
    return replace(plan, notes=(*plan.notes, *filter(None, compared)))


def find_remedies(
    console: Console, spec: PlacementSpec, plan: Plan, make: JudgingPlanner
) -> BudgetError:
    """The error that says why ``plan`` does not fit, with the changes that were tried."""
    if plan.fits_devices:  # the host has too little
        return host_error(plan)
    with progress(console, "planning changes that may make it fit", make):
        return misfit_error(spec, plan, make)


def print_tried(console: Console, error: BudgetError, *, as_json: bool) -> NoReturn:
    """Print that no strategy fits, which were tried, and what would do; exit with `EXIT_NO_FIT`."""
    console.print(f"{error.where}: {error.problem}", style="bold red", markup=False)
    _print_short(console, error, "tried:")
    needed = error.needed or error.remedy
    _print_fitting(console, error, needed)
    if any(tried.fits and tried.step_seconds is None for tried in error.tried):
        console.print("(times are known with --kind)", style="dim", markup=False)
    if as_json:
        print_json(_misfit(error, needed))
    raise typer.Exit(EXIT_NO_FIT)


def report_misfit(
    console: Console, spec: PlacementSpec, plan: Plan, make: JudgingPlanner, error: BudgetError
) -> NoReturn:
    """Print what would make the placement fit, and exit with `EXIT_NO_FIT`.

    ``make`` plans a changed spec; ``error`` has the changes that have been tried.
    """
    if plan.fits_devices:
        console.print(f"what would make it fit:\n  - {error.remedy}", markup=False)
        raise typer.Exit(EXIT_NO_FIT)
    no_room = lacks_room(spec)
    if not no_room:
        largest = find_largest_node(spec, make)
        console.print(largest.describe(), style="bold red", markup=False)
    with progress(console, "planning with other amounts of memory", make, compare=False):
        needed = memory_needed(spec, make)
    _print_fitting(console, error, needed)
    if any(tried.fits and tried.step_seconds is None for tried in error.tried):
        hint = "(in this order by reference rates; times are known with --kind)"
        console.print(hint, style="dim", markup=False)
    if no_room:
        console.print(f"no change of the placement was tried: {no_room}", markup=False)
    _print_short(console, error, "tried, not enough:")
    raise typer.Exit(EXIT_NO_FIT)


def _print_fitting(console: Console, error: BudgetError, needed: str) -> None:
    console.print("what would make it fit:")
    fitting = [describe_fitting(tried) for tried in error.tried if tried.fits]
    for remedy in (*fitting, needed):
        _print_item(console, remedy)


def _print_short(console: Console, error: BudgetError, title: str) -> None:
    short = [f"{t.change}: {describe_shortage(t)}" for t in error.tried if not t.fits]
    if short:
        console.print(title, style="dim", markup=False)
    for line in short:
        _print_item(console, line, style="dim")


def _print_item(console: Console, text: str, *, style: str = "") -> None:
    """Print an item of a list, whose further lines begin below its text."""
    item = textwrap.TextWrapper(console.width, break_long_words=False, break_on_hyphens=False)
    item.initial_indent, item.subsequent_indent = "  - ", "    "
    console.print(item.fill(text), style=style, markup=False)


def _misfit(error: BudgetError, needed: str) -> Mapping[str, Any]:
    return {
        "fits": False,
        "device": error.device,
        "missing_bytes": error.missing_bytes,
        "problem": error.problem,
        "largest_node": {"node": error.largest_node, "bytes": error.largest_node_bytes},
        "remedies": [*(t.change for t in error.tried if t.fits), needed],
        "tried": [asdict(tried) for tried in error.tried],
    }
