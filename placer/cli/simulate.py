"""``placer simulate``: dry-run a training step of the placed model on simulated devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from placer.cli.options import AsJson, LossOptions, ModelOptions, Processes, SpecOrPlan
from placer.cli.output import EXIT_NO_FIT, human_console, print_json
from placer.cli.progress import progress

if TYPE_CHECKING:
    from placer.simulation import SimulationReport


_FAR_OFF = 0.1  # share of the simulated peak; a prediction for the same inputs is closer than this
_OTHER_INPUTS = (
    "the peaks that {} predicts are far off: it was probably made for inputs of another size; "
    "make a plan for these with 'placer plan'"
)
EXAMPLE = "placer simulate net.py:Net spec.json --input 8x64"


def simulate(
    model_options: ModelOptions,
    loss_options: LossOptions,
    spec: SpecOrPlan = None,
    processes: Processes = False,
    as_json: AsJson = False,
) -> None:
    """Run a training step on simulated devices and show their peaks; nothing is allocated."""
    from placer.cli.sources import given_placement
    from placer.plan.summary import describe_loss
    from placer.plan.types import Plan
    from placer.report import simulation_table, with_simulation

    model_options, given = given_placement(model_options, spec)
    if isinstance(given, Plan):
        processes |= given.processes
    wanted = loss_options.added_to(given)
    model_options.check()
    console = human_console(as_json=as_json)
    loaded = model_options.load(console)
    from placer.api import simulate_captured
    from placer.search.auto import plan_of
    from placer.simulation.judge import JudgingPlanner

    program, leaves = loaded.record(console, wanted)
    plan = wanted
    make = JudgingPlanner(program, leaves, processes=processes)
    if not isinstance(plan, Plan):
        with progress(console, "planning", make):
            plan = plan_of(plan, make)
    with progress(console, "running a training step without data"):
        report = simulate_captured(program, plan, leaves, make.loss_of(wanted), processes=processes)
    notes = []
    if plan.loss is not None:
        notes.append(describe_loss(plan.loss, plan.stages[-1].devices[0]))
    if isinstance(wanted, Plan) and _far_off(report):
        notes.append(_OTHER_INPUTS.format(spec or "the plan"))
    plan = replace(plan, processes=processes, notes=tuple(notes))
    console.print(simulation_table(plan, report))
    if as_json:
        print_json(report.to_json())
    if not with_simulation(plan, report).fits:
        raise typer.Exit(EXIT_NO_FIT)


def _far_off(report: SimulationReport) -> bool:
    return any(
        abs(device.predicted - device.peak) > _FAR_OFF * device.peak for device in report.devices
    )
