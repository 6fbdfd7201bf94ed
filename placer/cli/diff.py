"""``placer diff``: what is different between two plans, or between two specs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placer.cli.options import AsJson
from placer.cli.output import EXIT_DIFFERENT, human_console, print_json
from placer.errors import PlacerError

Before = Annotated[Path, typer.Argument(metavar="BEFORE", help="A plan or a spec.")]
After = Annotated[Path, typer.Argument(metavar="AFTER", help="Another one, of the same kind.")]

EXAMPLE = "placer diff before.json after.json"


def diff(before: Before, after: After, as_json: AsJson = False) -> None:
    """Show what is different between two plans, or between two specs.

    Of plans these are the strategy, the seconds of a step, the bytes of each device of the first replica,
    and the layers that moved. The exit code is 1 if anything is different.
    """
    from placer.cli.sources import load_spec_or_plan
    from placer.plan.types import Plan
    from placer.report.differences import differences
    from placer.tables import Table

    given = [load_spec_or_plan(path) for path in (before, after)]
    plans = [isinstance(each, Plan) for each in given]
    if plans[0] != plans[1]:
        spec = (before, after)[plans.index(False)]
        remedy = f"make a plan of it: placer plan MODEL {spec} --input … -o plan.json"
        raise PlacerError(str(spec), "is a spec, and the other file is a plan", remedy)
    changes = differences(*given)
    console = human_console(as_json=as_json)
    if changes:
        texts = ("before", "after")
        console.print(Table(headers=("", *texts), rows=changes, names=("", *texts), words=texts))
    else:
        console.print("no difference")
    if as_json:
        print_json({"equal": not changes, "changes": [change._asdict() for change in changes]})
    if changes:
        raise typer.Exit(EXIT_DIFFERENT)
