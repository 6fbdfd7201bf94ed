"""When nothing fits: print what would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import typer
from rich.console import Console
from torch import Tensor

from placer.capture import Capture
from placer.cli.main import EXIT_NO_FIT
from placer.cli.output import print_json, progress
from placer.errors import BudgetError, Tried
from placer.plan.check import describe_overflow
from placer.plan.types import Plan
from placer.planner.build import PlanMaker
from placer.planner.remedies import find_largest_node, lacks_room, memory_needed, misfit_error
from placer.spec import PlacementSpec
from placer.units import format_bytes


def report_misfit(
    console: Console,
    capture: Capture,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    plan: Plan,
    make: PlanMaker,
    *,
    error: BudgetError | None = None,
    as_json: bool = False,
) -> NoReturn:
    """Print what would make the placement fit and leave with the exit code for a misfit.

    ``make`` plans a changed spec. ``error`` has the tries, if they were made already. With
    ``as_json`` it goes to stdout.
    """
    if error is None:
        largest = find_largest_node(capture, spec, inputs, make.costs)
        needs = f"the placement needs {describe_overflow(plan.tightest)}; {largest.describe()}"
        console.print(needs, style="bold red", markup=False)
        console.print("what would make it fit:")
        with progress(console, "planning changes that may make it fit"):
            error = misfit_error(
                capture, spec, inputs, plan, make, found=partial(_print_tried, console)
            )
    else:  # the changes were tried before anything was printed
        console.print(error.problem, style="bold red", markup=False)
        console.print("what would make it fit:")
        for tried in error.tried:
            _print_tried(console, tried)
    with progress(console, "planning with other amounts of memory"):
        needed = memory_needed(spec, make)
    console.print(f"  - {needed}", markup=False)
    if reason := lacks_room(spec):
        console.print(f"no change of the placement was tried: {reason}", markup=False)
    if as_json:
        print_json(_misfit(error, needed))
    raise typer.Exit(EXIT_NO_FIT)


def _print_tried(console: Console, tried: Tried) -> None:
    """A change on a line of its own; one that does not suffice says so."""
    if tried.fits:
        console.print(f"  - {tried.change}", markup=False)
        return
    line = f"  - not enough: {tried.change}: {format_bytes(tried.peak)}"
    console.print(line, style="dim", markup=False)


def _misfit(error: BudgetError, needed: str) -> Mapping[str, Any]:
    return {
        "fits": False,
        "device": error.device,
        "missing_bytes": error.missing_bytes,
        "problem": error.problem,
        "largest_node": {"node": error.largest_node, "bytes": error.largest_node_bytes},
        "remedies": [*(t.change for t in error.tried if t.fits), needed],
        "tried": [{"change": t.change, "fits": t.fits, "peak": t.peak} for t in error.tried],
    }
