"""``placer auto``: find the fastest way to train a model on the given devices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.fields import errors_name_options, spec_fields, spec_of_options
from placer.cli.options import (
    REPEATABLE,
    AsJson,
    Explain,
    Kind,
    LossOptions,
    ModelOptions,
    Page,
    Processes,
    to_file,
)
from placer.cli.output import human_console, print_json, tell_written, write_or_print
from placer.cli.progress import progress
from placer.errors import BudgetError, PlacerError
from placer.spec import PlacementSpec

Devices = Annotated[
    list[str],
    typer.Option(
        "--device",
        "-d",
        metavar="NAME[=MEMORY]",
        help="A device that may be used, such as cuda:0=16GiB; repeatable, or several with commas.",
        callback=lambda texts: [part for text in texts for part in text.split(",")],
        **REPEATABLE,
    ),
]
Output = Annotated[Path | None, to_file("SPEC", "Write the spec here.")]
PlanOutput = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN", help="Save the plan here too (JSON).")
]
Machine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME[:NODES]|FILE",
        help="Instead of --device: all devices of this machine, with its links.",
    ),
]
Split = Annotated[
    list[str],
    typer.Option(
        "--split",
        metavar="NAME=whole|DIM",
        help='How an input is split with the batch, as in a spec\'s "inputs": prior=whole, or state=1 for '
        "the dimension of its rows; repeatable.",
        **REPEATABLE,
    ),
]
Alternatives = Annotated[
    int, typer.Option("--alternatives", min=0, help="How many other kinds of strategy to show.")
]
Fields = Annotated[
    dict[str, Any],
    spec_fields(
        *("objective", "replicas", "stages", "space", "microbatches", "schedule", "checkpoint"),
        *("offload", "chunks", "precision", "optimizer", "training", "reserve", "host_memory"),
        *("shard_state", "shard_over", "node_layout", "batch", "offload_overlap"),
        chosen=(
            *("replicas", "stages", "space", "microbatches", "schedule", "chunks", "shard_state"),
            "node_layout",
        ),
    ),
]


EXAMPLE = "placer auto net.py:Net --input 8x64 --machine dgx-a100"


def auto(
    model_options: ModelOptions,
    devices: Devices,
    loss_options: LossOptions,
    fields: Fields,
    split: Split,
    machine: Machine = None,
    output: Output = None,
    plan_output: PlanOutput = None,
    html: Page = None,
    alternatives: Alternatives = 9,
    explain: Explain = False,
    processes: Processes = False,
    kind: Kind = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest way to train the model that fits the devices.

    Replicas, stages, shards in space, micro-batches, schedule and recomputation are chosen together; what you
    give stays as it is. Without -o, the spec is printed to stdout and the table to stderr; with --json, the
    spec and the plan, which has the alternatives.
    """
    from placer.files import check_spec_path, check_writable

    wanted = wanted_spec(devices, machine, kind, fields, loss_options, split)
    model_options.check()
    check_spec_path(output)
    check_writable(plan_output, html)
    console = human_console(as_json=as_json or output is None)
    loaded = model_options.load(console)
    from placer.cli.misfit import print_tried, with_comparisons
    from placer.cli.sources import with_origin
    from placer.plan.store import plan_to_json, save_plan
    from placer.program.call import describe_shapes
    from placer.report import plan_table, write_html
    from placer.search.auto import choose_spec, with_known_devices
    from placer.simulation.judge import JudgingPlanner

    with errors_name_options(devices):
        with_known_devices(wanted)  # `choose_spec` does it too, after the model is recorded
    program, leaves = loaded.record(console, wanted, searched=True)
    make = JudgingPlanner(program, leaves, processes=processes)
    try:
        with (
            progress(console, "looking for the fastest strategy that fits", make),
            errors_name_options(devices),
        ):
            found = choose_spec(wanted, make)
            made = with_comparisons(found.plan, found.spec, make)
            made = replace(made, alternatives=made.alternatives[:alternatives])
            made = with_origin(made, model_options, describe_shapes(leaves), found.spec)
    except BudgetError as error:
        print_tried(console, error, as_json=as_json)
    console.print(plan_table(made))
    if plan_output is not None:
        save_plan(made, plan_output)
        tell_written(console, "plan", plan_output)
    if html is not None:
        write_html(made, html, simulation=make.simulate(made))
        tell_written(console, "page", html)
    if explain:
        console.print("\n" + made.explain(), markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json({"spec": json.loads(found.spec.to_json()), "plan": plan_to_json(made)})
    if output is not None or not as_json:
        write_or_print(found.spec.to_json(), output, "spec", console)


def wanted_spec(
    devices: Sequence[str],
    machine: str | None,
    kind: str | None,
    fields: Mapping[str, Any],
    loss_options: LossOptions,
    split: Sequence[str],
) -> PlacementSpec:
    """The spec of all devices that may be used, with the fields that options give. Raises ``PlacerError``."""
    if machine and (devices or kind):
        raise PlacerError("--machine", "is given, and devices too", "leave out --device and --kind")
    where = {"machine": machine} if machine else {"devices": written_devices(devices, kind)}
    inputs = dict(map(_how_split, split)) or None
    return spec_of_options(devices, **fields, **where, loss=loss_options.spec(), inputs=inputs)


def _how_split(text: str) -> tuple[str, Any]:
    """How an input is split, as a spec has it, from a text such as ``state=1``."""
    name, equals, how = text.rpartition("=")
    if not equals:
        remedy = f"write {text}=whole, or the dimension of its rows, as in {text}=1"
        raise PlacerError(f"--split {text}", "does not say how the input is split", remedy)
    return name, {"batch_dim": int(how)} if how.isdecimal() else how


def written_devices(texts: Sequence[str], kind: str | None) -> list[dict[str, Any]]:
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
