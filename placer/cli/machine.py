"""``placer machine``: the machines that placer knows, and a file for yours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.options import AsJson, to_file
from placer.cli.output import human_console, print_json
from placer.cli.progress import progress
from placer.errors import PlacerError
from placer.machine.catalogue import CATALOGUE
from placer.machine.machine import Machine, find_machine, shipped_machines
from placer.tables import Table

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME[:NODES]|FILE]",
        help="The machine to show; by default all.",
        show_default=False,
    ),
]
Output = Annotated[Path | None, to_file("FILE", "Write the machine here (JSON).")]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Measure the links between this machine's devices; under torchrun, those between nodes too.",
    ),
]
Count = Annotated[
    int | None,
    typer.Option("--devices", min=1, help="How many devices to measure; by default all GPUs."),
]
Kind = Annotated[
    str,
    typer.Option(
        "--kind", metavar="NAME|FILE", help="The kind of the measured devices.", show_default="cpu"
    ),
]

EXAMPLE = "placer machine --measure --devices 2 -o machine.json"


def machine(
    name: Name = None,
    output: Output = None,
    measure: Measure = False,
    devices: Count = None,
    kind: Kind = "",
    as_json: AsJson = False,
) -> None:
    """Show the machines that placer knows, or measure the links of this one.

    A spec names a machine instead of devices: {"machine": "dgx-a100:4"} has four nodes, {"machine":
    "machine.json"} is the one in a file.
    """
    from placer.files import check_writable, writing

    check_writable(output)
    console = human_console(as_json=as_json)
    found = [_measured(console, devices, kind, output)] if measure else []
    if not measure:
        found = [find_machine(each) for each in ([name] if name else shipped_machines())]
    chosen = [each for each in found if each is not None]
    if not chosen:
        return  # a rank other than the first
    console.print(_table(chosen))
    for each in chosen:
        if each.source and len(chosen) == 1:
            console.print(f"source: {each.source}", style="dim", markup=False)
    values = [each.model_dump(mode="json", exclude_none=True, by_alias=True) for each in chosen]
    if output is not None:
        if len(chosen) > 1:
            raise PlacerError("--output", "one file has one machine", "name one, or give --measure")
        with writing(output):
            output.write_text(chosen[0].model_dump_json(exclude_none=True, indent=2) + "\n")
        console.print(
            f'machine written to {output}; in a spec: {{"machine": "{output}"}}', markup=False
        )
    if as_json:
        print_json(values if len(values) > 1 else values[0])


def _measured(console: Any, devices: int | None, kind: str, output: Path | None) -> Machine | None:
    """The machine with measured links; None on all ranks of a job but the first."""
    with progress(console, "importing torch"):
        import torch

        from placer.profiling.links import measure_links
    count = torch.cuda.device_count()
    device_type = "cuda" if count and kind != "cpu" else "cpu"
    if device_type == "cuda" and not kind:
        raise PlacerError(
            "--kind", "is not given", f"name the kind of the GPUs: {', '.join(CATALOGUE)}"
        )
    number = devices or count or 2
    with progress(console, f"measuring the links between {number} devices"):
        found = measure_links(device_type, number)
    if found is None:
        return None
    from placer.planner.devices import machine_memory

    return Machine(
        name=output.stem if output else "here",
        source=f"placer machine --measure, torch {torch.__version__}",
        nodes=found.nodes,
        devices_per_node=found.devices_per_node,
        device_type="cuda" if device_type == "cuda" else "cpu",
        kind=kind or "cpu",
        memory=None if device_type == "cuda" else machine_memory() // found.devices_per_node,
        inside=found.inside,
        network=found.network,
        network_cards=found.devices_per_node if found.network else 1,
    )


def _table(machines: list[Machine]) -> Table:
    rows: list[list[str | float]] = []
    for each in machines:
        network = each.network
        rows.append(
            [
                each.name,
                each.kind,
                f"{each.nodes} x {each.devices_per_node}",
                each.inside.send / 1e9,
                (each.inside.bus or each.inside.send) / 1e9,
                "-" if network is None else network.send / 1e9,
                "-" if network is None else each.network_cards,
            ]
        )
    headers = ("machine", "kind", "nodes", "send GB/s", "bus GB/s", "network GB/s", "cards")
    return Table(headers=headers, rows=rows, names=("machine", "kind", "nodes"))
