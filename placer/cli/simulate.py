"""``placer simulate``: dry-run a training step of the placed model on simulated devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from placer.cli.options import (
    AsJson,
    Loss,
    ModelOptions,
    Processes,
    SpecOrPlan,
    Target,
    with_loss,
)
from placer.cli.output import human_console, print_json, progress
from placer.tables import FittedTable

if TYPE_CHECKING:
    from placer.plan.types import Plan
    from placer.simulation import SimulationReport


_FAR_OFF = 0.1  # share of the simulated peak; a prediction for the same inputs is closer than this
_OTHER_INPUTS = (
    "the peaks that {} predicts are far off: it was probably made for inputs of another size; "
    "make a plan for these with 'placer plan'"
)
EXAMPLE = "placer simulate net.py:Net spec.json --input 8x64"


def simulate(
    model_options: ModelOptions,
    spec: SpecOrPlan,
    target: Target,
    loss: Loss = None,
    processes: Processes = False,
    as_json: AsJson = False,
) -> None:
    """Run a training step on simulated devices and show their peaks; nothing is allocated."""
    from placer.cli.main import EXIT_NO_FIT
    from placer.cli.sources import load_spec_or_plan
    from placer.plan.summary import describe_loss
    from placer.plan.types import Plan, everything_fits
    from placer.report import host_text, moment_text, verdict, verdict_style, with_simulation

    wanted = with_loss(load_spec_or_plan(spec), loss, target)
    model_options.check()
    console = human_console(as_json=as_json)
    with progress(console, "importing torch and the model"):
        from placer.api import simulate_captured
        from placer.simulation.judge import JudgingPlanner

        loaded = model_options.load()
    with progress(console, "recording the operations of the model"):
        program, leaves = loaded.program(wanted)
    plan = wanted
    make = JudgingPlanner(program, leaves, processes=processes)
    if not isinstance(plan, Plan):
        with progress(console, "planning"):
            plan = make(plan)
    with progress(console, "running a training step without data"):
        report = simulate_captured(program, plan, leaves, make.loss_of(wanted), processes=processes)
    console.print(_table(plan, report))
    found = report.to_json()
    for name, device in found["devices"].items():
        moment = f"{name} at its peak, in {moment_text(device)}: the largest of what is live"
        console.print(f"\n{moment}", markup=False)
        console.print(_moment(device))
    if waits := host_text(report.host):
        console.print(f"\n{waits}", markup=False)
    if plan.loss is not None:
        text = describe_loss(plan.loss, plan.stages[-1].devices[0])
        console.print(f"note: {text}", style="dim", markup=False)
    if isinstance(wanted, Plan) and _far_off(report):
        console.print(f"note: {_OTHER_INPUTS.format(spec)}", style="dim", markup=False)
    judged = with_simulation(plan, report)
    fits = everything_fits(judged.devices, report.host)
    judged = replace(judged, processes=processes, host=report.host, fits=fits)
    for line in verdict(judged):
        console.print(line, style=verdict_style(judged), markup=False)
    if as_json:
        print_json(found)
    if not judged.fits:
        raise typer.Exit(EXIT_NO_FIT)


def _table(plan: Plan, report: SimulationReport) -> FittedTable:
    from placer.quantities import format_bytes
    from placer.report import relative_difference

    table = FittedTable(optional=("difference", "predicted", "budget", "peak is in"))
    table.add_column("device")
    reserved = any(device.reserved is not None for device in report.devices)
    taken = ("reserved",) if reserved else ()
    for header in ("simulated", "predicted", "difference", *taken, "budget"):
        table.add_column(header, justify="right")
    table.add_column("peak is in", wraps=True)
    budgets = {device.device: device.budget for device in plan.devices}
    for device in report.devices:
        budget = budgets[device.device]
        table.add_row(
            device.device,
            format_bytes(device.peak),
            format_bytes(device.predicted),
            relative_difference(device.predicted, device.peak),
            *(
                ["-" if device.reserved is None else format_bytes(device.reserved)]
                if reserved
                else []
            ),
            "not known" if budget is None else format_bytes(budget),
            ", ".join(part for part in (device.phase, device.node) if part),
        )
    return table


def _moment(device: Mapping[str, Any]) -> FittedTable:
    """The tensors alive on the device at its peak, the largest first."""
    from placer.report import LARGEST_HEADERS, largest_rows

    table = FittedTable(optional=("name", "made in", "shape"))
    for header in LARGEST_HEADERS:
        is_size = header == "bytes"
        table.add_column(header, justify="right" if is_size else "left", wraps=not is_size)
    for row in largest_rows(device):
        table.add_row(*row)
    return table


def _far_off(report: SimulationReport) -> bool:
    return any(
        abs(device.predicted - device.peak) > _FAR_OFF * device.peak for device in report.devices
    )
