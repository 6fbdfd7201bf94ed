"""``placer auto``: find a spec with which a model fits the given devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.fields import errors_name_options, spec_fields, spec_of_options
from placer.cli.options import REPEATABLE, AsJson, Kind, Loss, ModelOptions, Target, loss_option
from placer.cli.output import human_console, print_text
from placer.cli.progress import progress
from placer.errors import BudgetError, PlacerError

Devices = Annotated[
    list[str],
    typer.Option(
        "--device",
        "-d",
        metavar="NAME[=MEMORY]",
        help="A device that may be used, such as cuda:0=16GiB; repeatable.",
        **REPEATABLE,
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="SPEC", help="Write the spec here.")
]
PlanOutput = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN", help="Save the plan here too (JSON).")
]
Fields = Annotated[
    dict[str, Any],
    spec_fields(
        *("objective", "microbatches", "replicas", "schedule", "checkpoint", "offload"),
        *("precision", "optimizer", "training", "reserve", "host_memory"),
        objective="memory",
    ),
]


EXAMPLE = "placer auto net.py:Net --input 8x64 -d cuda:0=16GiB -o spec.json"


def auto(
    model_options: ModelOptions,
    devices: Devices,
    target: Target,
    fields: Fields,
    loss: Loss = None,
    output: Output = None,
    plan_output: PlanOutput = None,
    kind: Kind = None,
    as_json: AsJson = False,
) -> None:
    """Find a spec with which the model fits, using as few of the devices as possible.

    Without -o, the spec is printed to stdout and the table to stderr.
    """
    from placer.files import check_writable, writing

    wanted = spec_of_options(
        devices, **fields, devices=_devices(devices, kind), loss=loss_option(loss, target)
    )
    model_options.check()
    check_writable(output, plan_output)
    console = human_console(as_json=as_json or output is None)
    loaded = model_options.load(console)
    from placer.cli.fit import report_misfit, with_comparisons
    from placer.plan.store import save_plan
    from placer.planner.auto import choose_spec
    from placer.report import plan_table
    from placer.simulation.judge import JudgingPlanner

    program, leaves = loaded.record(console, wanted)
    make = JudgingPlanner(program, leaves)
    try:
        with (
            progress(console, "looking for a spec that fits", make, most=len(wanted.devices)),
            errors_name_options(devices),
        ):
            chosen = choose_spec(program, wanted, leaves, make)
            made = with_comparisons(make(chosen), chosen, make)
    except BudgetError as error:
        closest = make(wanted)
        console.print(plan_table(closest))
        report_misfit(
            console,
            program,
            wanted,
            leaves,
            closest,
            make,
            error=error,
            options=True,
            as_json=as_json,
        )
    console.print(plan_table(made))
    if plan_output is not None:
        save_plan(made, plan_output)
        console.print(f"plan written to {plan_output}")
    if output is not None:
        with writing(output):
            output.write_text(chosen.to_json(), encoding="utf-8")
        console.print(f"spec written to {output}")
    if as_json or output is None:
        print_text(chosen.to_json())


def _devices(texts: Sequence[str], kind: str | None) -> list[dict[str, Any]]:
    """The ``devices`` of a spec from texts such as ``cuda:0=16GiB``; the spec checks names and sizes."""
    if not texts:
        raise PlacerError("--device", "no device was given", "give --device cuda:0=16GiB")
    devices = []
    for text in texts:
        name, equals, memory = text.partition("=")
        if not equals and (colons := re.fullmatch(r"([a-z]+:\d+)\W+(\d\S*)", text)):
            near = f"{colons[1]}={colons[2]}"
            raise PlacerError(f"--device {text}", "is not a device", f"did you mean {near}?")
        device: dict[str, Any] = {"name": name.strip()}
        if equals:
            device["memory"] = int(memory) if memory.isdecimal() else memory
        if kind is not None:
            device["kind"] = kind
        devices.append(device)
    return devices
