"""Plan a full brain volume, train a small 3D U-Net on 2 stages x 2 replicas, and check it: ``make demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from examples.demo.run import run_demo

parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
parser.add_argument(
    "--output", "-o", type=Path, default=Path("demo_output"), help="folder for the files it writes"
)
parser.add_argument("--steps", type=int, default=150, help="of training, at least 2")
given = parser.parse_args()
run_demo(given.output, Console(), steps=max(2, given.steps))
