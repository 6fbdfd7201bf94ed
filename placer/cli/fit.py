"""When nothing fits: print what would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from torch import Tensor

from placer.capture import Capture
from placer.cli.main import EXIT_NO_FIT
from placer.cli.output import print_json
from placer.errors import BudgetError
from placer.plan.build import PlanMaker
from placer.plan.remedies import lacks_room, memory_needed, misfit_error
from placer.plan.types import Plan
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
    with console.status("looking for what would fit …"):
        error = error or misfit_error(capture, spec, inputs, plan, make)
        needed = memory_needed(spec, make)
    console.print(error.problem, style="bold red", markup=False)
    console.print("what would make it fit:")
    for change in [*(t.change for t in error.tried if t.fits), needed]:
        console.print(f"  - {change}", markup=False)
    if reason := lacks_room(spec):
        console.print(f"no change of the placement was tried: {reason}", markup=False)
    short = [t for t in error.tried if not t.fits]
    if short:
        console.print("tried, and not enough:")
    for tried in short:
        line = f"  - {tried.change}: {format_bytes(tried.peak)}"
        console.print(line, style="dim", markup=False)
    if as_json:
        print_json(_misfit(error, needed))
    raise typer.Exit(EXIT_NO_FIT)


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
