"""Runs a selected part of the test suite on every release that pyproject.toml allows: `make versions`.

    python -m benchmarks.versions --uv .venv/bin/uv [--row NAME …] [--keep FOLDER]

Each row gets its own environment, which uv hard-links from one cache. Results of rows that are not run this
time stay as they are. Rows are torch's releases at both ends and each minor
release between, the lowest release of everything, and the committed lock on every Python.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

from benchmarks.record import RESULTS, table, write_page

ROOT = Path(__file__).parents[1]
# Both runtimes, what stands on private names, and what differs between releases; at most 3 minutes.
TESTS = (
    "tests/versions",
    "tests/test_package.py",
    "tests/spec",
    "tests/schedule",
    "tests/program",
    "tests/emit",
    "tests/cost",
    "tests/cli/test_doctor.py",
    "tests/simulation/test_ledger.py",
    "tests/simulation/test_hand_written.py",
    "tests/executor/test_gradients.py",
    "tests/executor/test_kept_when_placed.py",
    "tests/executor/test_transforms.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/regions/test_equality.py",
    "tests/distributed/test_equality.py",
    "tests/distributed/test_values.py",
    "tests/distributed/test_checkpoint.py",
    "tests/distributed/test_training.py",
)
_SHOWN = (
    "torch",
    "torchvision",
    "networkx",
    "numpy",
    "pydantic",
    "rich",
    "safetensors",
    "typer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An environment: a Python, the packages that uv installs, and how it resolves version ranges."""

    name: str
    python: str
    requirements: tuple[str, ...]
    resolution: str = "highest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a row; ``problem`` says why there is none, "" if there is one."""

    name: str
    python: str
    releases: dict[str, str]
    problem: str = ""
    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: dict[str, int] | None = None  # reason -> tests
    seconds: float = 0.0


ROWS: tuple[Row, ...] = (
    *(
        Row(
            name=f"torch {release}",
            python="3.11",
            requirements=(f"torch=={release}.*", "-e", ".[test]"),
        )
        for release in ("2.11", "2.12", "2.13", "2.14", "2.15")
    ),
    Row(
        name="lowest of all",
        python="3.11",
        requirements=("-e", ".[test]", "pip>=24", "setuptools>=77"),  # a test builds a wheel
        resolution="lowest-direct",
    ),
    *(
        Row(
            name=f"lock, Python {python}",
            python=python,
            requirements=("-r", "requirements.lock", "-e", "."),
        )
        for python in ("3.11", "3.12", "3.13")
    ),
)


def main(
    uv: Annotated[str, typer.Option(help="The uv that makes environments.")] = "uv",
    row: Annotated[list[str] | None, typer.Option(help="Only these rows.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Make environments here and keep them.")] = None,
) -> None:
    """Run the rows and write ``benchmarks/results/versions.md`` and ``.json``."""
    path = RESULTS / "versions.json"
    known = {}
    if path.exists():
        known = {each["name"]: Outcome(**each) for each in json.loads(path.read_text())}
    uv = shutil.which(uv) or sys.exit(f"there is no {uv}")
    for each in ROWS:
        if row and each.name not in row:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = (keep or Path(folder)) / each.name.replace(" ", "_").replace(",", "")
            known[each.name] = _run(each, environment, uv)
        outcomes = [known[r.name] for r in ROWS if r.name in known]
        path.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    _write(outcomes)


def _run(row: Row, environment: Path, uv: str) -> Outcome:
    print(f"{row.name}: installing", flush=True)
    python = environment / "bin" / "python"
    commands = [
        [uv, "venv", "--quiet", "--allow-existing", "--python", row.python, str(environment)],
        [
            *(uv, "pip", "install", "--quiet", "--python", str(python)),
            *("--resolution", row.resolution, "pip", "setuptools>=77", *row.requirements),
        ],
    ]
    here_only = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}  # a row needs its Python on PATH
    for command in commands:
        done = subprocess.run(
            command, cwd=ROOT, env=here_only, capture_output=True, text=True, check=False
        )
        if done.returncode:
            problem = " ".join(done.stderr.split())[:300]
            print(f"{row.name}: {problem}", flush=True)
            return Outcome(name=row.name, python=row.python, releases={}, problem=problem)
    releases = _releases(uv, python)
    print(f"{row.name}: testing, torch {releases['torch']}", flush=True)
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        start = time.perf_counter()
        subprocess.run(
            [
                *(str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"),
                *("-p", "no:cacheprovider"),
                *("--junitxml", report.name, *TESTS),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        seconds = time.perf_counter() - start
        outcome = _read(row, releases, Path(report.name), seconds)
    print(f"{row.name}: {outcome.passed} passed, failed: {', '.join(outcome.failed) or 'none'}")
    return outcome


def _releases(uv: str, python: Path) -> dict[str, str]:
    command = [uv, "pip", "list", "--quiet", "--python", str(python), "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {each["name"]: each["version"].partition("+")[0] for each in json.loads(listed)}
    return {name: found[name] for name in _SHOWN}


def _read(row: Row, releases: dict[str, str], report: Path, seconds: float) -> Outcome:
    """The counts of pytest's JUnit report."""
    if report.stat().st_size == 0:
        return Outcome(
            name=row.name, python=row.python, releases=releases, problem="pytest did not start"
        )
    failed, skipped, passed = [], Counter[str](), 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            skipped[re.sub(r"\s+", " ", skip.get("message", ""))] += 1
        else:
            passed += 1
    if not passed:
        problem = "pytest ran no test"
        return Outcome(name=row.name, python=row.python, releases=releases, problem=problem)
    return Outcome(
        name=row.name,
        python=row.python,
        releases=releases,
        passed=passed,
        failed=tuple(failed),
        skipped=dict(skipped),
        seconds=round(seconds, 1),
    )


def _write(outcomes: Sequence[Outcome]) -> None:
    header = ["row", "Python", *_SHOWN, "passed", "failed", "skipped", "seconds"]
    rows, remarks = [], []
    for each in outcomes:
        if each.problem:
            rows.append([each.name, each.python, *["-"] * (len(_SHOWN) + 4)])
            remarks.append(f"- {each.name} cannot be had: {each.problem}")
            continue
        skipped = each.skipped or {}
        counts = [each.passed, len(each.failed), sum(skipped.values()), f"{each.seconds:.0f}"]
        rows.append([each.name, each.python, *(each.releases[n] for n in _SHOWN), *counts])
        remarks += [f"- {each.name}, failed: {', '.join(each.failed)}"] * bool(each.failed)
        remarks += [f"- {each.name}, {n} skipped: {why}" for why, n in sorted(skipped.items())]
    lines = [
        "The same tests in every row, over both runtimes: those of "
        + ", ".join(f"`{name}`" for name in TESTS)
        + ".",
        "",
        *table(header, rows),
        *remarks,
        "",
    ]
    write_page("versions", "Releases that were run", "make versions", lines)


if __name__ == "__main__":
    typer.run(main)
