"""Print which changes would make a placement fit that does not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

import typer
from rich.console import Console
from torch import Tensor

from placer.cli.main import EXIT_NO_FIT
from placer.cli.output import print_json
from placer.cli.progress import progress
from placer.errors import BudgetError
from placer.plan.check import host_error
from placer.plan.types import Plan
from placer.planner.remedies import (
    describe_fitting,
    find_largest_node,
    lacks_room,
    memory_needed,
    misfit_error,
)
from placer.program import Program
from placer.quantities import format_bytes
from placer.search.fewer import as_fast_with_fewer
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec


def with_comparisons(plan: Plan, spec: PlacementSpec, make: JudgingPlanner) -> Plan:
    """``plan`` for ``spec`` with notes on what else would be faster, or have another verdict."""
    compared = (as_fast_with_fewer(spec, plan, make), make.elsewhere(spec, plan))
    return replace(plan, notes=(*plan.notes, *filter(None, compared)))


def find_remedies(
    console: Console,
    program: Program,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    plan: Plan,
    make: JudgingPlanner,
) -> BudgetError:
    """The error that says why ``plan`` does not fit, with the changes that were tried."""
    if plan.fits_devices:  # the host has too little
        return host_error(plan)
    with progress(console, "planning changes that may make it fit", make):
        return misfit_error(program, spec, inputs, plan, make)


def print_tried(console: Console, error: BudgetError, *, as_json: bool) -> NoReturn:
    """Print that no strategy fits, which were tried, and what would do; exit with `EXIT_NO_FIT`."""
    console.print(f"{error.where}: {error.problem}", style="bold red", markup=False)
    console.print("tried (largest peak of a device):")
    for tried in error.tried:
        if not tried.fits:
            line = f"  - {tried.change}: {format_bytes(tried.peak)}"
            console.print(line, style="dim", markup=False)
    console.print("what would make it fit:")
    fitting = [describe_fitting(tried) for tried in error.tried if tried.fits]
    needed = error.needed or error.remedy
    for remedy in (*fitting, needed):
        console.print(f"  - {as_option(remedy)}", markup=False)
    if any(tried.fits and tried.step_seconds is None for tried in error.tried):
        console.print("(times are known with --kind)", style="dim", markup=False)
    if as_json:
        print_json(_misfit(error, needed))
    raise typer.Exit(EXIT_NO_FIT)


def report_misfit(
    console: Console,
    program: Program,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    plan: Plan,
    make: JudgingPlanner,
    *,
    error: BudgetError | None = None,
    as_json: bool = False,
) -> NoReturn:
    """Print what would make the placement fit, and exit with `EXIT_NO_FIT`.

    ``make`` plans a changed spec; ``error`` has the changes that have been tried, if any have. With
    ``as_json``, the result is also printed to stdout as JSON.
    """
    if error is None:
        error = find_remedies(console, program, spec, inputs, plan, make)
    if plan.fits_devices:
        remedy = error.remedy
        console.print(f"what would make it fit:\n  - {remedy}", markup=False)
        if as_json:
            print_json(_misfit(error, remedy))
        raise typer.Exit(EXIT_NO_FIT)
    no_room = lacks_room(spec)
    if not no_room:
        largest = find_largest_node(program, spec, inputs, make)
        console.print(largest.describe(), style="bold red", markup=False)
    console.print("what would make it fit:")
    for tried in error.tried:
        if tried.fits:
            console.print(f"  - {describe_fitting(tried)}", markup=False)
    with progress(console, "planning with other amounts of memory", make, compare=False):
        needed = memory_needed(spec, make)
    console.print(f"  - {needed}", markup=False)
    if any(tried.fits and tried.step_seconds is None for tried in error.tried):
        hint = "(in this order by reference rates; times are known with --kind)"
        console.print(hint, style="dim", markup=False)
    if no_room:
        console.print(f"no change of the placement was tried: {no_room}", markup=False)
    short = [tried for tried in error.tried if not tried.fits]
    if short:
        console.print("tried, not enough (largest peak of a device):", style="dim")
    for tried in short:
        line = f"  - {tried.change}: {format_bytes(tried.peak)}"
        console.print(line, style="dim", markup=False)
    if as_json:
        print_json(_misfit(error, needed))
    raise typer.Exit(EXIT_NO_FIT)


_SPEC_FIELD = re.compile(r'"(\w+)": (?:"auto"|"?([\w.]+)"?)')


def as_option(change: str) -> str:
    """Rewrite a change of a spec's fields as one of the options of ``placer auto``.

    >>> as_option('split the batch: "microbatches": 2, "schedule": "1F1B"')
    'split the batch: --microbatches 2 --schedule 1F1B'
    >>> as_option('"checkpoint": "auto" and "offload": "auto" (recompute or wait)')
    '--checkpoint --offload (recompute or wait)'
    >>> as_option('write a smaller "reserve" into the spec')
    'give a smaller --reserve'
    >>> as_option('give more "host_memory", or recompute others ("checkpoint")')
    'give more --host-memory, or recompute others (--checkpoint)'
    >>> as_option('"offload": "auto" and "host_memory": "1.5GiB" (wait in host memory)')
    '--offload --host-memory 1.5GiB (wait in host memory)'
    """
    change = change.replace('write a smaller "reserve" into the spec', "give a smaller --reserve")
    options = _SPEC_FIELD.sub(
        lambda m: f"--{m[1].replace('_', '-')}" + (f" {m[2]}" if m[2] else ""), change
    )
    options = options.replace('"host_memory"', "--host-memory").replace(
        '"checkpoint")', "--checkpoint)"
    )
    return re.sub(r"(?<=\S)(?:,| and) --", " --", options)


def _misfit(error: BudgetError, *needed: str) -> Mapping[str, Any]:
    return {
        "fits": False,
        "device": error.device,
        "missing_bytes": error.missing_bytes,
        "problem": error.problem,
        "largest_node": {"node": error.largest_node, "bytes": error.largest_node_bytes},
        "remedies": [*(t.change for t in error.tried if t.fits), *needed],
        "tried": [asdict(tried) for tried in error.tried],
    }
