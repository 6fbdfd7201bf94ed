"""``placer fit``: find the largest input with which a model can be trained on the given devices."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placer.cli.auto import Devices, Fields, Machine, Output, Split, wanted_spec
from placer.cli.fields import errors_name_options
from placer.cli.options import AsJson, Kind, LossOptions, ModelOptions, Processes
from placer.cli.output import EXIT_NO_FIT, human_console, print_json, write_or_print
from placer.cli.progress import progress
from placer.errors import CaptureError, PlacerError

if TYPE_CHECKING:
    from placer.spec import PlacementSpec

Multiple = Annotated[
    int,
    typer.Option("--multiple", min=1, help="Sizes are multiples of this number.", show_default="1"),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="SIZES",
        help="The sizes that are tried first, such as 256x256x192; all others have their proportions. By "
        "default the search begins at one multiple, and all sizes are equal.",
    ),
]
Most = Annotated[
    int | None,
    typer.Option(
        "--most",
        min=1,
        help="The largest size that is tried, in multiples; by default 64, or eight times --like.",
    ),
]


EXAMPLE = "placer fit net.py:Net --input '{b}x64' -d cuda:0 --kind t4"


def fit(
    model_options: ModelOptions,
    devices: Devices,
    loss_options: LossOptions,
    fields: Fields,
    split: Split,
    multiple: Multiple = 1,
    like: Like = None,
    most: Most = None,
    machine: Machine = None,
    output: Output = None,
    processes: Processes = False,
    kind: Kind = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest input with which the model can be trained on the devices.

    Names in braces are the sizes that are looked for: {b}x3x224x224 asks for the batch, 1x1x{z}x{y}x{x} for a
    volume; --target may have them too. The strategy is chosen anew for every size, as by auto.
    """
    from placer.files import check_spec_path

    names = free_names(model_options.inputs, loss_options.target)
    unit = proportions(names, like, multiple)
    first = _count(like, multiple)
    most = most or max(64, 8 * first)
    check_spec_path(output)

    def filled(texts: Sequence[str], size: int) -> list[str]:
        sizes = dict(zip(names, sizes_of(unit, multiple, size), strict=True))
        return [text.format_map(sizes) for text in texts]

    def options_for(size: int) -> ModelOptions:
        return replace(model_options, inputs=filled(model_options.inputs, size))

    def wanted_for(size: int) -> PlacementSpec:
        loss = replace(loss_options, target=filled(loss_options.target, size))
        return wanted_spec(devices, machine, kind, fields, loss, split)

    wanted_for(1)
    options_for(1).check()
    console = human_console(as_json=as_json or output is None)
    loaded = options_for(1).load(console)
    from placer.cli.loaded_model import make_arguments
    from placer.report.text import sizes_table
    from placer.search.auto import with_known_devices
    from placer.search.largest import Case, SizeTried, find_largest
    from placer.simulation.judge import JudgingPlanner

    with errors_name_options(devices):
        with_known_devices(wanted_for(1))
    with (
        progress(console, "looking for the largest input", compare=False) as told,
        errors_name_options(devices),
    ):

        def case_of(size: int) -> Case:
            told.about = _shape(size)
            told.doing("recording")
            args, kwargs = make_arguments(loaded.model, options_for(size), allocate=False)
            wanted = wanted_for(size)
            try:
                given = replace(loaded, args=args, kwargs=kwargs)
                program, leaves = given.captured(wanted, searched=True)
            except CaptureError as error:
                error.remedy += (
                    "; if forward needs larger sizes, give them in --like; if it needs multiples of "
                    "a number, such as 16, give that in --multiple"
                )
                raise
            make = JudgingPlanner(program, leaves, processes=processes)
            make.watcher = told
            return Case(make=make, wanted=wanted)

        def _shape(size: int) -> str:
            return "x".join(map(str, sizes_of(unit, multiple, size)))

        bounds: dict[str, str] = {}  # the largest that fits, and the smallest that does not

        def hear(tried: SizeTried) -> None:
            bounds["fits" if tried.fits else "does not fit"] = _shape(tried.size)
            told.found(", ".join(f"{shape} {word}" for word, shape in bounds.items()))

        found = find_largest(range(1, most + 1), case_of, hear, first - 1)
    rows = [(_shape(tried.size), tried) for tried in found.tried]
    console.print(sizes_table(rows, ", ".join(names)))
    if as_json:
        values: list[dict[str, Any]] = [
            {
                "sizes": dict(zip(names, sizes_of(unit, multiple, tried.size), strict=True)),
                "fits": tried.fits,
                "strategy": tried.strategy,
                "step_seconds": tried.plan.step_seconds if tried.plan and tried.fits else None,
                "headroom": tried.plan.tightest.headroom if tried.plan else None,
            }
            for tried in found.tried
        ]
        spec = None if found.answer is None else json.loads(found.answer.spec.to_json())
        print_json({"tried": values, "spec": spec})
    if found.answer is None:
        console.print(f"not even {_shape(1)} fits", style="bold red")
        raise typer.Exit(EXIT_NO_FIT)
    console.print(
        f"largest: {_shape(found.size or 1)}, {found.answer.plan.strategy}", style="bold green"
    )
    if found.size == most:
        console.print(f"no larger size was tried (--most {most})")
    if output is not None or not as_json:
        write_or_print(found.answer.spec.to_json(), output, "spec", console)


def free_names(inputs: Sequence[str], target: Sequence[str] = ()) -> list[str]:
    """The names in braces, in order. Raises ``PlacerError`` if no input has one, or ``target`` has others.

    >>> free_names(["2x1x{z}x{y}x{x}", "mask={z}x4"], ["2x{z}x{y}x{x}"])
    ['z', 'y', 'x']
    """
    found, others = (
        dict.fromkeys(name for text in texts for name in _in_braces(option, text))
        for option, texts in (("--input", inputs), ("--target", target))
    )
    if not found:
        raise PlacerError(
            "--input",
            "has no size in braces",
            "write the sizes to look for as names: 1x1x{z}x{y}x{x}",
        )
    if more := [name for name in others if name not in found]:
        known = ", ".join(f"{{{name}}}" for name in found)
        raise PlacerError("--target", f"has {{{more[0]}}}, which no --input has", f"write {known}")
    return list(found)


def _in_braces(option: str, text: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(text) if name]
    except ValueError as error:
        raise PlacerError(option, str(error), "write {z} for a size") from None


def proportions(names: Sequence[str], like: str | None, multiple: int) -> list[float]:
    """The sizes of ``names`` in proportion to the largest, which is 1. Raises ``PlacerError``.

    >>> proportions(["z", "y", "x"], "256x256x192", 32)
    [1.0, 1.0, 0.75]
    """
    if like is None:
        return [1.0] * len(names)
    parts = like.split("x")
    if len(parts) != len(names) or not all(part.isdecimal() and int(part) for part in parts):
        form = "x".join(f"{{{name}}}" for name in names)
        raise PlacerError(f"--like {like}", f"does not say the sizes {form}", "write 256x256x192")
    sizes = [int(part) for part in parts]
    return [size / max(sizes) for size in sizes]


def _count(like: str | None, multiple: int) -> int:
    """How many multiples the largest size of ``like`` has; 1 without."""
    return max(1, max(map(int, like.split("x"))) // multiple) if like else 1


def sizes_of(unit: Sequence[float], multiple: int, count: int) -> list[int]:
    """The sizes whose largest is ``count`` multiples.

    >>> sizes_of([1.0, 1.0, 0.75], 32, 8)
    [256, 256, 192]
    """
    return [multiple * max(1, round(count * share)) for share in unit]
