"""``placer verify``: check that the placed model computes what the original model does."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placer.cli.options import AsJson, LossOptions, ModelOptions, SpecOrPlan
from placer.cli.output import EXIT_DIFFERENT, human_console, print_json
from placer.cli.progress import progress
from placer.errors import PlacerError, first_few
from placer.tables import Table

if TYPE_CHECKING:
    from placer.plan.types import Plan
    from placer.spec import PlacementSpec
    from placer.verification import Comparison, Verification

_SHOWN = 10  # how much of what differs is listed
# Columns of the table, each with the kinds that it counts; all other kinds are "state".
_COLUMNS = {"results": ("output", "loss"), "gradients": ("gradient",)}

Double = Annotated[
    bool, typer.Option("--double", help="Run model and inputs in float64, and compare to 1e-10.")
]
RunOn = Annotated[
    str | None,
    typer.Option(
        "--run-on",
        metavar="DEVICE",
        help="Run all stages on this device (default: the devices of the spec, or the CPU if this "
        "machine has none of their type).",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the weights, the inputs and dropout.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance", help="Relative tolerance (default: by the dtype of the parameters)."
    ),
]


EXAMPLE = "placer verify net.py:Net spec.json --input 8x64 --double"


def verify(
    model_options: ModelOptions,
    loss_options: LossOptions,
    spec: SpecOrPlan = None,
    double: Double = False,
    run_on: RunOn = None,
    seed: Seed = 0,
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """Call the placed and the original model in several situations, and compare all that a caller can see.

    The situations are train and eval mode, with and without gradients, with other inputs, and with another
    batch size. Every output, gradient, parameter, buffer, attribute and mode is compared. The exit code is 1
    if any of them differs.

    The original model runs on the CPU. On a GPU, fp32 is computed without TF32, and dropout draws other
    random numbers than on the CPU, so that nothing with dropout is compared: set its probability to 0, or use
    --run-on cpu.
    """
    from placer.cli.sources import given_placement

    model_options, given = given_placement(model_options, spec)
    wanted = loss_options.added_to(given)
    _check_run_on(run_on)
    model_options.check()
    console = human_console(as_json=as_json)
    loaded = model_options.load(console, allocate=True, double=double, seed=seed)
    from placer.verification import verify as compare

    try:
        with progress(console, "calling the placed model and the plain model") as told:
            result = compare(
                loaded.model,
                wanted,
                loaded.args,
                loaded.kwargs,
                run_on=run_on or _substitute_device(wanted),
                seed=seed,
                tolerance=tolerance,
                ignore_device_moves=model_options.ignore_device_moves,
                each_situation=told.doing,
            )
    except PlacerError as error:
        if double and isinstance(
            error.__cause__, RuntimeError
        ):  # of types, torch raises no other class
            hint = "leave out --double if the model makes tensors of another type itself"
            error.remedy = f"{error.remedy}; or {hint}" if error.remedy else hint
        raise
    console.print(_table(result))
    console.print()
    for line in (*_different(result), *result.remarks):
        console.print(line, markup=False, soft_wrap=True)
    style = "bold green" if result.ok else "bold red"
    console.print(result.summary, style=style, markup=False)
    if not (result.ok or double):
        console.print("If this is rounding, it is gone in float64: try --double")
    if as_json:
        print_json(to_json(result))
    if not result.ok:
        raise typer.Exit(EXIT_DIFFERENT)


def to_json(result: Verification) -> dict[str, Any]:
    """The result as JSON values. An error that is not finite (NaN, a missing tensor) becomes null."""

    def values(c: Comparison) -> dict[str, Any]:
        error = c.relative_error if math.isfinite(c.relative_error) else None
        return {**asdict(c), "relative_error": error, "ok": c.ok}

    return {
        "equal": result.ok,
        "reference": result.reference,
        "random_layers": list(result.random_layers),
        "remarks": list(result.remarks),
        "situations": [
            {
                "situation": outcome.situation,
                "compared": bool(outcome.comparisons),
                "equal": outcome.ok if outcome.comparisons else None,
                "slices": outcome.slices,
                "note": outcome.note,
            }
            for outcome in result.outcomes
        ],
        "worst": values(result.worst),
        "comparisons": [values(comparison) for comparison in result.comparisons],
    }


def _check_run_on(name: str | None) -> None:
    from placer.spec.fields import device_name

    try:
        device_name("cpu" if name is None else name)
    except ValueError as error:
        raise PlacerError("--run-on", str(error)) from None


def _substitute_device(wanted: PlacementSpec | Plan) -> str | None:
    """``"cpu"`` if this machine lacks a type of device that the spec or plan names, else None."""
    from placer.executor.places.device_map import device_count
    from placer.plan.types import Plan

    if isinstance(wanted, Plan):
        names = [name for stage in wanted.stages for name in stage.devices]
    else:
        names = [device.name for device in wanted.devices]
    kinds = {name.partition(":")[0] for name in names} - {"cpu"}
    return "cpu" if any(device_count(kind) == 0 for kind in kinds) else None


def _table(result: Verification) -> Table:
    """One row per situation: how much was compared, and the largest difference."""
    figures = (*_COLUMNS, "state", "error", "tolerance")
    rows = []
    for outcome in result.outcomes:
        if not outcome.comparisons:
            rows.append([outcome.situation, *[""] * len(figures), "not compared"])
            continue
        counts = [sum(outcome.counts.get(kind, 0) for kind in kinds) for kinds in _COLUMNS.values()]
        worst = max(outcome.comparisons, key=lambda c: c.relative_error)
        rows.append(
            [
                outcome.situation,
                *map(str, (*counts, len(outcome.comparisons) - sum(counts))),
                f"{worst.relative_error:.1e}",
                f"{worst.tolerance:.0e}",
                "EQUAL" if outcome.ok else "DIFFERENT",
            ]
        )
    return Table(
        headers=("situation", *figures, ""),
        rows=rows,
        names=("situation", ""),
        optional=("tolerance", "state"),
    )


def _different(result: Verification) -> list[str]:
    """What differs, in the first situation in which anything does."""
    off = result.different
    lines = first_few([str(c) for c in off if c.situation == off[0].situation], _SHOWN)
    head = [f"{off[0].situation}:"] if off else []
    return head + [f"  {line}" for line in lines]
