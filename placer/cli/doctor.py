"""``placer doctor``: show this machine's packages and devices, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from placer.cli.options import AsJson
from placer.cli.output import human_console, print_json
from placer.tables import FittedTable

if TYPE_CHECKING:
    from placer.doctor import Diagnosis


EXAMPLE = "placer doctor --json"


def doctor(as_json: AsJson = False) -> None:
    """Show packages, devices and what placer can do here. The exit code is 2 if something is missing."""
    from placer import __version__
    from placer.cli.main import EXIT_USAGE
    from placer.doctor import examine

    found = examine()
    if as_json:
        print_json({"placer": __version__, **found.to_json()})
    else:
        console = human_console(as_json=False)
        for table in (_packages(found), _devices(found), _features(found)):
            console.print(table)
            console.print()
        for line in _remarks(found):
            console.print(line, markup=False, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(EXIT_USAGE)


def _packages(found: Diagnosis) -> FittedTable:
    table = FittedTable()
    for header in ("package", "installed", "run with", "status"):
        table.add_column(header, wraps=header == "status")
    for package in found.packages:
        release = package.release or "not installed"
        table.add_row(package.range.package, release, str(package.range), package.status)
    return table


def _devices(found: Diagnosis) -> FittedTable:
    from placer.quantities import format_bytes

    table = FittedTable()
    table.add_column("device")
    table.add_column("what it is", wraps=True)
    table.add_column("memory", justify="right")
    table.add_column("free", justify="right")
    for device in found.devices:
        sizes = ("unknown" if n is None else format_bytes(n) for n in (device.memory, device.free))
        table.add_row(device.name, device.description, *sizes)
    return table


_FEATURES = {
    "planning": "plan, simulate, report",
    "running": "run a placed model in one process",
    "a process per device": "torchrun: a process per device",
}


def _features(found: Diagnosis) -> FittedTable:
    table = FittedTable()
    for header in ("what placer does", "here", "what is missing"):
        table.add_column(header, wraps=True)
    for state in found.features:
        missing = f"{state.missing[0]}: {state.remedy}" if state.missing else ""
        table.add_row(_FEATURES[state.feature], "no" if state.missing else "yes", missing)
    return table


def _remarks(found: Diagnosis) -> list[str]:
    lines = [f"platform: {found.platform}"]
    if found.torch_error:
        lines.append(f"torch cannot be imported: {found.torch_error}")
    else:
        lines.append(f"torch is built for: {found.torch_build}")
        have = [name for name, there in found.backends.items() if there]
        lines.append(f"backends of torch.distributed: {', '.join(have) or 'none'}")
    if not any(device.name != "cpu" for device in found.devices):
        lines.append(
            "no accelerator: planning needs none; to run a placed model here, pass run_on='cpu'"
        )
    settings = [f"{name}={value}" for name, value in found.allocator.items()]
    lines.append(f"allocator settings: {', '.join(settings) or 'default'}")
    lines += [
        f"not installed for placer[{extra}]: {', '.join(names)}"
        for extra, names in found.missing_extras.items()
    ]
    return lines
