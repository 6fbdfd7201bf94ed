"""``placer auto``: find a spec with which a model fits the given devices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.options import AsJson, Kind, Loss, ModelOptions, Target, loss_option
from placer.cli.output import human_console, print_text, progress

Devices = Annotated[
    list[str],
    typer.Option(
        "--device",
        "-d",
        metavar="NAME[=MEMORY]",
        help="A device that may be used, such as cuda:0=16GiB; repeatable.",
        default_factory=list,
        show_default=False,
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="SPEC", help="Write the spec here.")
]
PlanOutput = Annotated[
    Path | None, typer.Option("--plan", metavar="PLAN", help="Save the plan here too (JSON).")
]
Objective = Annotated[
    str, typer.Option("--objective", help="throughput, memory, latency or bottleneck.")
]
Microbatches = Annotated[
    str, typer.Option("--microbatches", metavar="N", help="How many micro-batches, or 'auto'.")
]
Replicas = Annotated[
    str, typer.Option("--replicas", metavar="N", help="How many replicas, or 'auto'.")
]
Schedule = Annotated[
    str | None,
    typer.Option("--schedule", help="Pipeline schedule, by torch's name: GPipe, 1F1B, …"),
]
Checkpoint = Annotated[
    bool,
    typer.Option(
        "--checkpoint", help="Recompute activations in the backward pass, as needed to fit."
    ),
]
Offload = Annotated[
    bool,
    typer.Option("--offload", help="Keep activations in host memory, as needed to fit."),
]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16.")]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", help="sgd, sgd_momentum, adam, adamw or bytes=N.")
]
Training = Annotated[
    bool,
    typer.Option(
        "--training/--no-training",
        help="Plan for training, with gradients and optimizer state, or for inference.",
    ),
]
Reserve = Annotated[
    str | None,
    typer.Option("--reserve", metavar="SIZE", help="Memory to keep free on each device."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory", metavar="SIZE", help="Host memory that offloaded activations may take."
    ),
]


EXAMPLE = "placer auto net.py:Net --input 8x64 -d cuda:0=16GiB -o spec.json"


def auto(
    model_options: ModelOptions,
    devices: Devices,
    target: Target,
    loss: Loss = None,
    output: Output = None,
    plan_output: PlanOutput = None,
    kind: Kind = None,
    objective: Objective = "memory",
    microbatches: Microbatches = "1",
    replicas: Replicas = "1",
    schedule: Schedule = None,
    checkpoint: Checkpoint = False,
    offload: Offload = False,
    precision: Precision = None,
    optimizer: Optimizer = None,
    training: Training = True,
    reserve: Reserve = None,
    host_memory: HostMemory = None,
    as_json: AsJson = False,
) -> None:
    """Find a spec with which the model fits, using as few of the devices as possible.

    Without -o, the spec is printed to stdout and the table to stderr.
    """
    from placer.files import check_writable, writing
    from placer.spec import PlacementSpec

    given = {
        "devices": _devices(devices, kind),
        "objective": objective,
        "microbatches": _count(microbatches),
        "replicas": _count(replicas),
        "training": training,
        "schedule": schedule,
        "checkpoint": "auto" if checkpoint else None,
        "offload": "auto" if offload else None,
        "precision": precision,
        "optimizer": _optimizer(optimizer),
        "loss": loss_option(loss, target),
        "reserve": reserve,
        "host_memory": int(host_memory) if host_memory and host_memory.isdecimal() else host_memory,
    }
    with errors_name_options(devices):
        wanted = PlacementSpec.model_validate(
            {field: value for field, value in given.items() if value is not None}
        )
    model_options.check()
    check_writable(output, plan_output)
    console = human_console(as_json=as_json or output is None)
    with progress(console, "importing torch and the model"):
        from placer.cli.fit import report_misfit, with_comparisons
        from placer.errors import BudgetError
        from placer.plan.store import save_plan
        from placer.planner.auto import choose_spec
        from placer.report import plan_table
        from placer.simulation.judge import JudgingPlanner

        loaded = model_options.load()
    with progress(console, "recording the operations of the model"):
        program, leaves = loaded.program(wanted)
    make = JudgingPlanner(program, leaves)
    try:
        with (
            progress(console, "looking for a spec that fits"),
            errors_name_options(devices),
        ):
            chosen = choose_spec(program, wanted, leaves, make)
            made = with_comparisons(make(chosen), chosen, make)
    except BudgetError as error:
        closest = make(wanted)
        console.print(plan_table(closest))
        report_misfit(console, program, wanted, leaves, closest, make, error=error, as_json=as_json)
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
    from placer.errors import PlacerError

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


@contextmanager
def errors_name_options(devices: Sequence[str]) -> Iterator[None]:
    """In this block, a ``SpecError`` names options of the command, since there is no spec file."""
    from placer.errors import SpecError

    try:
        yield
    except SpecError as error:
        problems = [_as_option(devices, *problem) for problem in error.problems]
        raise SpecError(SpecError.OPTIONS, dict.fromkeys(problems)) from None


def _as_option(
    devices: Sequence[str], pointer: str, problem: str, remedy: str
) -> tuple[str, str, str]:
    """A problem with a field of a spec, rewritten for the option that set the field."""
    _, field, *path = pointer.split("/")
    option = f"--{field.replace('_', '-')}"
    if field == "devices" and path[-1:] == ["kind"]:
        option = "--kind"
    elif field == "devices" and path:
        text = devices[int(path[0])]
        option = f"--device {text}"
        if '"memory"' in remedy:
            kinds = remedy.partition("one of ")[2]
            remedy = f"write --device {text}=16GiB, or give --kind: one of {kinds}"
    return option, problem, remedy


def _count(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _optimizer(text: str | None) -> Any:
    """The ``optimizer`` of a spec from its name, or from ``bytes=8``: bytes of state per parameter."""
    if text is not None and text.startswith("bytes=") and text.removeprefix("bytes=").isdecimal():
        return {"bytes_per_parameter": int(text.removeprefix("bytes="))}
    return text
