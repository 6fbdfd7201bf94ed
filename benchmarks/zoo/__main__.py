"""``python -m benchmarks.zoo LIBRARY [NAME …] [--limit N] [--jobs N] [--again failed|all]``.

Every model is judged in a process of its own (forked, so that torch and the library are imported
once) with a limit on processor time and on memory. Verdicts are kept in
``benchmarks/results/zoo_LIBRARY.json`` and a run goes on where the last one ended; the table is
``benchmarks/results/zoo_LIBRARY.md``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import RESULTS
from benchmarks.zoo.judge import as_json, judge
from benchmarks.zoo.subject import Subject, Verdict
from benchmarks.zoo.table import write_table

LIBRARIES = ("torchvision", "transformers", "monai", "timm", "research", "patterns")
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("names", nargs="*", help="models to judge (again), by default all")
    parser.add_argument("--limit", type=int, default=None, help="judge at most this many models")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="of processor time, per model")
    parser.add_argument("--gib", type=float, default=8.0, help="resident memory, per model")
    parser.add_argument("--again", choices=("failed", "all"), help="judge these anew")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    module = importlib.import_module(f"benchmarks.zoo.{options.library}_models")
    subjects: dict[str, Subject] = {subject.name: subject for subject in module.subjects()}
    store = RESULTS / f"zoo_{options.library}.json"
    verdicts = _read(store)
    if not options.table:
        todo = _todo(options, subjects, verdicts)
        for verdict in _judge_all(todo, options.jobs, options.seconds, options.gib):
            verdicts = {**_read(store), verdict["name"]: verdict}  # another run may write it too
            _write(store, {name: verdicts[name] for name in subjects if name in verdicts})
            _say(verdict)
    packages = getattr(module, "PACKAGES", (options.library,))
    write_table(options.library, list(subjects), verdicts, packages)


def _todo(options: Any, subjects: dict[str, Subject], verdicts: dict[str, Any]) -> list[Subject]:
    unknown = [name for name in options.names if name not in subjects]
    if unknown:
        sys.exit(f"not in the zoo of {options.library}: {', '.join(unknown)}")
    if options.names:
        return [subjects[name] for name in options.names]

    def wanted(name: str) -> bool:
        if name not in verdicts or options.again == "all":
            return True
        return options.again == "failed" and not verdicts[name]["passed"]

    return [subject for name, subject in subjects.items() if wanted(name)][: options.limit]


def _judge_all(
    subjects: list[Subject], jobs: int, seconds: float, gib: float
) -> Iterator[dict[str, Any]]:
    """Verdicts in the order in which they finish, from ``jobs`` processes at a time."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(subjects), []
    while waiting or running:
        while waiting and len(running) < jobs:
            subject = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(subject, sender))
            process.start()
            sender.close()
            running.append((subject.name, process, receiver))
        time.sleep(0.1)
        for item in list(running):
            name, process, receiver = item
            verdict = _poll(name, process, receiver, seconds, gib)
            if verdict is not None:
                running.remove(item)
                process.join()
                yield verdict


def _work(subject: Subject, sender: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # torch logs a traceback for what fails on fake tensors
    torch.set_num_threads(1)
    try:
        sender.send(as_json(judge(subject)))
    finally:
        sender.close()


def _poll(
    name: str, process: Any, receiver: Any, seconds: float, gib: float
) -> dict[str, Any] | None:
    if receiver.poll():
        try:
            return receiver.recv()
        except EOFError:
            process.join()
            return _failure(name, f"the process died with exit status {process.exitcode}")
    if not process.is_alive():
        return _failure(name, f"the process died with exit status {process.exitcode}")
    used, resident = _usage(process.pid)
    problem = ""
    if used > seconds:
        problem = f"time: more than {seconds:.0f} s of processor time"
    elif resident > gib * 2**30:
        problem = f"memory: more than {gib:g} GiB"
    if not problem:
        return None
    process.kill()
    return as_json(Verdict(name=name, passed=False, problem=problem, seconds=round(used, 1)))


def _failure(name: str, problem: str) -> dict[str, Any]:
    return as_json(Verdict(name=name, passed=False, problem=problem))


def _usage(pid: int) -> tuple[float, int]:
    """Processor seconds and resident bytes of a process, from /proc; zeros when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0
    pages = int(fields[21])
    return (int(fields[11]) + int(fields[12])) / _TICKS, pages * os.sysconf("SC_PAGE_SIZE")


def _read(store: Path) -> dict[str, dict[str, Any]]:
    return json.loads(store.read_text()) if store.exists() else {}


def _write(store: Path, verdicts: dict[str, Any]) -> None:
    store.parent.mkdir(exist_ok=True)
    fresh = store.with_suffix(".new")
    fresh.write_text(json.dumps(verdicts, indent=1) + "\n")
    fresh.replace(store)


def _say(verdict: dict[str, Any]) -> None:
    what = "ok" if verdict["passed"] else f"FAILED {verdict['problem']}"
    share = f"{verdict['largest_share']:.2f} {verdict['other_batch']}"
    print(f"{verdict['name']}: {verdict['seconds']} s, {share}: {what}", flush=True)


if __name__ == "__main__":
    main()
