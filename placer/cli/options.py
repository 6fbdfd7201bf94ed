"""The arguments and options that several commands share; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="package.module:callable or path/file.py:callable that makes it."
    ),
]
Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="Placement spec (JSON).")]
SpecOrPlan = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Placement spec or saved plan (JSON).")
]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="An input of forward, such as 1x3x224x224 or mask=4x16:bool; repeatable. "
        "Integers: 16x64:int64<50257 is below 50257. Or path/file.py:callable that returns the "
        "arguments of forward: lists and dicts of tensors, too.",
        default_factory=list,
        show_default=False,
    ),
]
Keywords = Annotated[
    list[str],
    typer.Option(
        "--kwarg",
        metavar="KEY=VALUE",
        help="An argument of forward that is no tensor; repeatable.",
        default_factory=list,
        show_default=False,
    ),
]
ModelArguments = Annotated[
    list[str],
    typer.Option(
        "--model-arg",
        "-m",
        metavar="KEY=VALUE",
        help="An argument of MODEL, such as width=32; repeatable.",
        default_factory=list,
        show_default=False,
    ),
]
Evaluation = Annotated[
    bool, typer.Option("--eval", help="Put the model into eval mode; by default it trains.")
]
Processes = Annotated[
    bool,
    typer.Option(
        "--processes", help="One process per device, as under torchrun, instead of one for all."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Only JSON on stdout; text for people on stderr.")
]
