"""``placer demo``: plan, train and verify a small 3D U-Net on a real brain volume."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "placer demo --steps 50 -o demo_output"


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for spec.json, plan.json, report.html.")
    ] = Path("demo_output"),
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 150,
) -> None:
    """Plan a full brain volume, train a small 3D U-Net on 2 stages x 2 replicas, and check it."""
    from rich.console import Console

    from placer.demo.run import run_demo

    run_demo(output, Console(), steps=steps)
