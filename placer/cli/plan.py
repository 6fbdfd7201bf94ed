"""``placer plan``: make a plan for a model from a spec, and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placer.cli.options import (
    AsJson,
    Explain,
    Kind,
    LossOptions,
    ModelOptions,
    Page,
    Processes,
    Profile,
    Spec,
    to_file,
)
from placer.cli.output import human_console, print_json, tell_written
from placer.cli.progress import progress

Output = Annotated[Path | None, to_file("PLAN", "Save the plan here (JSON).")]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="Write a trace of an estimated step here, for ui.perfetto.dev.",
    ),
]


EXAMPLE = "placer plan net.py:Net spec.json --input 8x64 -o plan.json"


def plan(
    model_options: ModelOptions,
    spec: Spec,
    loss_options: LossOptions,
    output: Output = None,
    html: Page = None,
    trace: Trace = None,
    explain: Explain = False,
    processes: Processes = False,
    kind: Kind = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show which device each layer goes to, and the memory and time it takes; nothing is allocated."""
    from placer.files import check_writable
    from placer.spec import load_spec

    wanted = loss_options.added_to(load_spec(spec, layer_paths=model_options.layer_paths))
    model_options.check()
    check_writable(output, html, trace)
    console = human_console(as_json=as_json)
    loaded = model_options.load(console)
    from placer.cli.measured import check_kind_file, with_kind, with_kind_file
    from placer.cli.misfit import find_remedies, report_misfit, with_comparisons
    from placer.cli.sources import with_origin
    from placer.plan.store import plan_to_json, save_plan
    from placer.program.call import describe_shapes
    from placer.report import plan_table, write_html, write_trace
    from placer.search.auto import plan_of
    from placer.simulation.judge import JudgingPlanner

    wanted = with_kind(with_kind_file(wanted, profile), kind)
    program, leaves = loaded.record(console, wanted)
    check_kind_file(profile, wanted, program)
    make = JudgingPlanner(program, leaves, processes=processes)
    with progress(console, "planning", make):
        made = plan_of(wanted, make)
        made = with_comparisons(made, wanted, make)
    made = with_origin(made, model_options, describe_shapes(leaves), wanted)
    console.print(plan_table(made))
    if explain:
        console.print("\n" + made.explain(), markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        save_plan(made, output)
        tell_written(console, "plan", output)
    error = None
    if not made.fits:
        error = find_remedies(console, wanted, made, make)
    simulated = None
    if html is not None or trace is not None:
        with progress(console, "running a training step without data"):
            simulated = make.simulate(made)
    if html is not None:
        remedies = () if error is None else error.tried
        write_html(made, html, simulation=simulated, remedies=remedies)
        tell_written(console, "page", html)
    if trace is not None:
        write_trace(made, trace, simulation=simulated)
        tell_written(console, "trace", trace)
    if as_json:
        print_json(plan_to_json(made))
    if error is not None:
        report_misfit(console, wanted, made, make, error)
