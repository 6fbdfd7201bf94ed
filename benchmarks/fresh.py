"""Measurements one by one, each in a process of its own, with results that are written as they come.

torch's CUDA allocator, its mode, its limit and the context are a process's, so is an error of CUDA's: a
measurement on a GPU needs a process. A benchmark lists its `Job`s; `measure_all` runs ``python -m MODULE
--job JOB`` for each, and writes ``PAGE.json`` and ``PAGE.md`` after each, so that a run that is cut off
keeps what it has. The process measures in `answer`.

Most of a job's time goes into planning, on the CPU. So ``--jobs N`` runs N processes at once, which take
turns on the GPU (`take_turn`).
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.record import RESULTS, gpu_users, versions, write_page
from placer._torch import has_expandable_segments
from placer.versions import ALLOCATOR_VARIABLES

ALLOCATORS = {"default": "expandable_segments:False", "expandable": "expandable_segments:True"}
_LONGEST = 240.0  # seconds of one job
_TURNS = 4  # so many jobs that need little of a GPU use it at once
_LOCKS = "PLACER_BENCHMARK_LOCKS"  # the folder of the turns' lock files, in a job's process
_held: list[IO[str]] = []  # until the process ends
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
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="so many processes at once, which take turns on the GPU")  # fmt: skip
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
    """Run the jobs, and write the results.

    ``jobs`` gets the rows by key. It is called again when all that it named have ended, until it names no
    more.
    """
    require_device(report.module, given.device)
    folder = output_folder(given)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / f"{report.page}.json")
    began, left_over, seen = time.monotonic(), 0, set[str]()
    longest = _LONGEST * given.jobs  # it may wait for its turn

    def run(job: Job) -> Row | None:
        left = 1e9 if given.minutes is None else 60 * given.minutes - (time.monotonic() - began)
        row = run_job(report.module, job, seconds=min(left, longest)) if left > 0 else {}
        return None if left <= 0 or ("cut off" in row and left < longest) else row

    with ThreadPoolExecutor(given.jobs) as pool:
        while new := [job for job in jobs(journal.rows) if job.key not in seen]:
            seen |= {job.key for job in new}
            wanted = [job for job in new if not (given.resume and journal.has(job.key))]
            running = {pool.submit(run, job): job for job in wanted}
            for done in as_completed(running):
                key, row = running[done].key, done.result()
                if row is None:
                    left_over += 1
                    continue
                journal.add(key, row)
                print(json.dumps({"job": key, **row}), flush=True)
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
    environment = {**os.environ, _LOCKS: tempfile.gettempdir()}
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
    found = dict(measure())
    wanted = values.get("allocator")
    used = wanted is not None and torch.cuda.is_initialized()
    if used and has_expandable_segments() != (wanted == "expandable"):
        raise RuntimeError(f"torch's allocator is not in the mode {wanted}")
    print(json.dumps(found), flush=True)


def take_turn(*, alone: bool = True) -> None:
    """In the process of a job: wait until the GPU is free, and keep it until the process ends.

    Where not ``alone``, a few other jobs may use it meanwhile.
    """
    if _held or _LOCKS not in os.environ:
        return
    paths = [Path(os.environ[_LOCKS], f"placer_gpu_turn_{i}") for i in range(_TURNS)]
    files = [path.open("w") for path in paths]
    _held.extend(files if alone else [files[os.getpid() % _TURNS]])
    for file in _held:
        fcntl.flock(file, fcntl.LOCK_EX)
    # The driver takes a moment to free what a process had that has just ended.
    until = time.monotonic() + 10
    while alone and gpu_users():
        if time.monotonic() > until:
            raise RuntimeError("something else uses the GPU: nothing can be measured")
        time.sleep(0.1)


def _write(report: Report, journal: Journal, folder: Path, *, show: bool) -> None:
    rows = [row for row in journal.rows.values() if "error" not in row]
    failed = {key: row["error"] for key, row in journal.rows.items() if "error" in row}
    lines = report.lines(rows) if rows else []
    if failed:
        lines += ["Not measured:", "", *(f"- {key}: {error}" for key, error in failed.items()), ""]
    write_page(report.page, report.title, report.command, lines, folder=folder, show=show)
