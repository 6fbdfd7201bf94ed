"""``placer calibrate``: measure how fast a device of this machine runs each class of operations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from placer.cli.options import AsJson, to_file
from placer.cli.output import human_console, print_json, tell_written
from placer.cli.progress import progress
from placer.tables import Table

if TYPE_CHECKING:
    from placer.machine.catalogue import DeviceKind

Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="The device to measure, such as cuda:0 or cpu. Default: cuda:0 if there is one.",
    ),
]
Output = Annotated[Path | None, to_file("FILE", "Write the kind here (JSON).")]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the device kind. Default: the name of the file."),
]
Budget = Annotated[
    float, typer.Option("--seconds", min=0.001, help="Seconds for each of about 100 samples.")
]

EXAMPLE = "placer calibrate --device cpu --seconds 0.01 -o this-machine.json"


def calibrate(
    device: Device = "",
    output: Output = None,
    name: Name = None,
    seconds: Budget = 0.15,
    as_json: AsJson = False,
) -> None:
    """Measure in under a minute how fast a device runs each class of operations.

    In a spec, the file can be the kind of a device: {"name": "cuda:0", "kind": "FILE"}. Other commands
    take it as --profile FILE.
    """
    console = human_console(as_json=as_json)
    with progress(console, "importing torch"):
        from placer.machine.kindfile import save_kind
        from placer.profiling import calibrate as measure
        from placer.profiling import check_output, device_here, file_values

    check_output(output)
    place = device_here(device)
    said: list[str] = []
    with progress(console, f"measuring {place}") as told:
        kind = measure(
            place,
            name=name or (output.stem if output else None),
            seconds=seconds,
            progress=lambda what, number, count: told.doing(f"{number} of {count}, {what}"),
            warn=said.append,
        )
    values = file_values(kind, place)
    console.print(_table(kind))
    for line in said:
        console.print(line, style="yellow", markup=False)
    if output is not None:
        save_kind(values, output)
        tell_written(console, "kind", output)
        console.print(f'  in a spec: {{"name": "{place}", "kind": "{output}"}}', markup=False)
    if as_json:
        print_json(values)


def _table(kind: DeviceKind) -> Table:
    from placer.machine.rates import CLASSES

    headers = ["class"]
    for dtype in ("float32", "half"):
        headers += [f"{dtype}: us", f"{dtype}: GFLOP/s", f"{dtype}: GB/s"]
    rows = []
    for name in CLASSES:
        row = [name.replace("_", " ")]
        for dtype in ("float32", "half"):
            rate = kind.rates[name, dtype]
            row.append(f"{rate.overhead * 1e6:.1f}")
            row.append(f"{rate.flops / 1e9:,.0f}" if rate.flops else "")
            row.append(f"{rate.bandwidth / 1e9:,.1f}")
        rows.append(row)
    optional = ("half: GFLOP/s", "float32: GFLOP/s", "half: us", "half: GB/s")
    return Table(headers=headers, rows=rows, names=("class",), optional=optional)
