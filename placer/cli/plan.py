"""``placer plan``: what a spec comes to for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placer.cli.options import AsJson, Processes, Profile, Spec, SubjectOptions
from placer.cli.output import people, print_json, progress

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Save the plan here (JSON).")
]
Page = Annotated[
    Path | None, typer.Option("--html", metavar="PAGE", help="Write the plan as a page here.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="Write when everything in a step runs, for ui.perfetto.dev.",
    ),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Say for every boundary why the stage ends there.")
]


EXAMPLE = "placer plan net.py:Net spec.json --input 8x64 -o plan.json"


def plan(
    subject: SubjectOptions,
    spec: Spec,
    output: Output = None,
    html: Page = None,
    trace: Trace = None,
    explain: Explain = False,
    processes: Processes = False,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show on which device everything goes and what it costs; nothing is allocated."""
    from placer.files import check_writable
    from placer.spec import load_spec

    wanted = load_spec(spec)
    subject.check()
    check_writable(output, html, trace)
    console = people(as_json=as_json)
    with progress(console, "importing torch and the model"):
        from placer.cli.fit import report_misfit
        from placer.cli.measured import with_kind_file
        from placer.plan.store import plan_to_json, save_plan
        from placer.report import plan_table, write_html, write_trace
        from placer.simulation.judge import plan_maker

        wanted = with_kind_file(wanted, profile)
        loaded = subject.load()
    with progress(console, "recording the operations of the model"):
        program, leaves = loaded.program()
    make = plan_maker(program, leaves, processes=processes)
    with progress(console, "planning"):
        made = make(wanted)
    console.print(plan_table(made))
    if explain:
        console.print("\n" + made.explain(), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        save_plan(made, output)
        console.print(f"plan written to {output}")
    if html is not None:
        write_html(made, html)
        console.print(f"page written to {html}")
    if trace is not None:
        write_trace(made, trace)
        console.print(f"trace written to {trace}")
    if as_json:
        print_json(plan_to_json(made))
    if not made.fits:
        report_misfit(console, program, wanted, leaves, made, make)
