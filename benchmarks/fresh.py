"""Measurements one by one, each in a process of its own, with results that are written as they come.

torch's CUDA allocator, its mode, its limit and the context are a process's, so is an error of CUDA's: a
measurement on a GPU needs a process. A benchmark lists its `Job`s; `measure_all` runs ``python -m MODULE
--job JOB`` for each, and writes ``PAGE.json`` and ``PAGE.md`` after each, so that a run that is cut off
keeps what it has. The process measures in `answer`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS, versions, write_page
from placer._torch import has_expandable_segments
from placer.versions import ALLOCATOR_VARIABLES

ALLOCATORS = {"default": "expandable_segments:False", "expandable": "expandable_segments:True"}
_LONGEST = 240.0  # seconds of one job
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One measurement: ``values`` are the process's, JSON; ``allocator`` is the mode of its allocator."""

    key: str
    values: Mapping[str, Any]
    allocator: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where results go: ``page`` is a name in the folder, ``lines`` makes the page's text from the rows."""

    module: str
    page: str
    title: str
    command: str
    lines: Callable[[list[Row]], list[str]]


@dataclass(slots=True)
class Journal:
    """Rows by their job's key, in a file that is written anew after each.

    Rows of other jobs stay, unless they are of another machine or other versions.
    """

    path: Path
    rows: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            found = json.loads(self.path.read_text())
            if found["versions"] == versions():
                self.rows = found["rows"]

    def add(self, key: str, row: Row) -> None:
        self.rows[key] = row
        whole = {"versions": versions(), "rows": self.rows}
        beside = self.path.with_suffix(".part")  # so that being cut off now loses nothing
        beside.write_text(json.dumps(whole, indent=1) + "\n")
        beside.replace(self.path)

    def has(self, key: str) -> bool:
        return "error" not in self.rows.get(key, {"error": ""})


def add_options(parser: argparse.ArgumentParser, *, device: str = "cuda") -> None:
    """The options of a benchmark that runs by `measure_all`; ``device`` is the default."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default=device,
                        help="cpu: small cases")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep rows that are there already")
    parser.add_argument("--minutes", type=float, help="begin nothing new after this time")
    parser.add_argument("--output", type=Path, metavar="FOLDER",
                        help="of the results; by default benchmarks/results, with --device cpu a "
                        "temporary one")  # fmt: skip
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)


def choose(
    parser: argparse.ArgumentParser, names: list[str], cases: Mapping[str, Any]
) -> list[str]:
    """``names``, or all of ``cases`` if there are none; an unknown one ends the program."""
    unknown = [name for name in names if name not in cases]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(cases)}")
    return names or list(cases)


def measure_all(
    report: Report,
    jobs: Callable[[Mapping[str, Row]], Iterable[Job]],
    given: argparse.Namespace,
) -> list[Row]:
    """Run the jobs, and write the results. ``jobs`` gets the rows by key, which grow as jobs end."""
    require_device(report.module, given.device)
    folder = output_folder(given)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / f"{report.page}.json")
    began, left_over = time.monotonic(), 0
    for job in jobs(journal.rows):
        if given.resume and journal.has(job.key):
            continue
        left = 1e9 if given.minutes is None else 60 * given.minutes - (time.monotonic() - began)
        row = run_job(report.module, job, seconds=min(left, _LONGEST)) if left > 0 else {}
        if left <= 0 or ("cut off" in row and left < _LONGEST):
            left_over += 1
            continue
        journal.add(job.key, row)
        print(json.dumps({"job": job.key, **row}), flush=True)
        _write(report, journal, folder, show=False)
    _write(report, journal, folder, show=True)
    if left_over:
        print(f"{left_over} jobs are left: run it again with --resume", flush=True)
    return list(journal.rows.values())


def output_folder(given: argparse.Namespace) -> Path:
    """Where the results go: small cases on a CPU are no results, so by default they go elsewhere."""
    if given.output is not None:
        return Path(given.output)
    return RESULTS if given.device == "cuda" else Path(tempfile.mkdtemp())


def require_device(module: str, device: str) -> None:
    """End the program if the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"{module} needs a CUDA device, and this machine has none; --device cpu tries it out"
        )


def run_job(module: str, job: Job, *, seconds: float) -> Row:
    """What the process of the job found; with ``error`` if it failed."""
    environment = dict(os.environ)
    if job.allocator is not None:
        for name in ALLOCATOR_VARIABLES:
            environment.pop(name, None)
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[job.allocator]
    values = {**job.values, "allocator": job.allocator}
    command = [sys.executable, "-m", module, "--job", json.dumps(values)]
    began = time.monotonic()
    row: Row = {**values, "date": datetime.date.today().isoformat()}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {**row, "error": f"stopped after {seconds:.0f} s", "cut off": True}
    row["took"] = round(time.monotonic() - began, 1)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr, flush=True)
        said = lines[-1][:300] if lines else "nothing on stderr"
        return {**row, "error": f"exit code {done.returncode}: {said}"}
    warned = [line for line in lines if "Warning" in line]
    return {
        **row,
        **json.loads(done.stdout.splitlines()[-1]),
        **({"warned": warned} if warned else {}),
    }


def answer(values: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> None:
    """In the process of a job: measure, and print the result for `run_job`.

    Fails if torch's allocator is not in the mode that the job is about: some releases of torch ignore a
    variable (pytorch#183387).
    """
    wanted = values.get("allocator")
    if wanted is not None and torch.cuda.is_available():
        torch.cuda.init()
        if has_expandable_segments() != (wanted == "expandable"):
            raise RuntimeError(f"torch's allocator is not in the mode {wanted}")
    print(json.dumps(dict(measure())), flush=True)


def _write(report: Report, journal: Journal, folder: Path, *, show: bool) -> None:
    rows = [row for row in journal.rows.values() if "error" not in row]
    failed = {key: row["error"] for key, row in journal.rows.items() if "error" in row}
    lines = report.lines(rows) if rows else []
    if failed:
        lines += ["Not measured:", "", *(f"- {key}: {error}" for key, error in failed.items()), ""]
    write_page(report.page, report.title, report.command, lines, folder=folder, show=show)
