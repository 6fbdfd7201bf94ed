"""``placer doctor``: show this machine's packages and devices, and what is missing."""

from __future__ import annotations

import typer

from placer.cli.installed import examine, report
from placer.cli.options import AsJson
from placer.cli.output import EXIT_USAGE, print_json, print_text

EXAMPLE = "placer doctor --json"


def doctor(as_json: AsJson = False) -> None:
    """Show packages, devices and what placer can do here. The exit code is 2 if something is missing."""
    found = examine()
    if as_json:
        print_json(found)
    else:
        print_text(report(found))
    if not found["ok"]:
        raise typer.Exit(EXIT_USAGE)
