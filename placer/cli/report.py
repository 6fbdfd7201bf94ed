"""``placer report``: write a saved plan as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placer.cli.options import Saved, to_file
from placer.cli.output import human_console, tell_written

Output = Annotated[Path, to_file("PAGE", "The HTML file.")]
Simulation = Annotated[
    Path | None,
    typer.Option(
        "--simulation",
        metavar="FILE",
        help="Output of 'simulate --json': its peaks are shown next to the predicted ones.",
    ),
]


EXAMPLE = "placer report plan.json -o report.html"


def report(
    plan: Saved, output: Output = Path("report.html"), simulation: Simulation = None
) -> None:
    """Write a saved plan as one self-contained HTML page."""
    from placer.errors import PlacerError
    from placer.files import check_writable
    from placer.jsonfile import read_json
    from placer.plan.store import load_plan
    from placer.report import write_html

    saved = load_plan(plan)
    check_writable(output)
    simulated = None if simulation is None else read_json(simulation)
    try:
        write_html(saved, output, simulation=simulated)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PlacerError(
            str(simulation), "does not hold simulated peaks", "give what 'simulate --json' printed"
        ) from None
    tell_written(human_console(as_json=False), "page", output)
