"""One process per device against one process, DDP, averaging by hand, and pipelining by hand.

``python -m benchmarks.distributed`` starts ``torchrun`` with two processes of one thread each. All
contestants of a comparison are in the same job and take turns, in random order, so that other
load on the machine affects them alike; a ratio is the median over all rounds of the ratio in a round.
Beside it is the ratio of the fastest steps, which other load disturbed least (as the documentation of
``timeit`` says, slower runs are usually due to other processes). The addresses of tensors make a difference
of 5 % for the same kernels and stay fixed for the life of a process, so there are several jobs, each of which
builds the contestants in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed.contestants import (
    LONG_ROWS,
    MICROBATCHES,
    overhead_cases,
    replica_cases,
    replica_contestants,
    stage_contestants,
    stage_model,
)
from benchmarks.distributed.pages import write_speed
from benchmarks.distributed.timing import KEEP_FREED_MEMORY, Seconds, take_turns


def compare(kind: str, rounds: int, seed: int) -> dict[str, Seconds]:
    """One of the comparisons: case -> contestant -> seconds of every round."""
    order = random.Random(seed)
    if kind == "replicas":
        cases = {name: replica_contestants(*case) for name, case in replica_cases().items()}
    elif kind == "stages":
        model = stage_model()
        cases = {str(count): stage_contestants(count, *model) for count in MICROBATCHES}
    elif kind == "long stages":
        model = stage_model(rows=LONG_ROWS)
        cases = {str(count): stage_contestants(count, *model) for count in MICROBATCHES[-2:]}
    else:
        cases = overhead_cases()
        rounds *= 20  # they take milliseconds
    return {name: take_turns(contestants, rounds, order) for name, contestants in cases.items()}


def work(what: str, path: Path, rounds: int, seed: int) -> None:
    """The work of each process of a job; rank 0 writes the findings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = compare(what, rounds, seed)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def run_job(what: str, rounds: int, seed: int) -> dict[str, Any]:
    """The findings of a job of two processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "benchmarks.distributed"]
        command += ["--worker", what, str(path), "--rounds", str(rounds), "--seed", str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
        subprocess.run(command, check=True, env=environment)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replica-jobs", type=int, default=4)
    parser.add_argument("--stage-jobs", type=int, default=12)
    parser.add_argument("--long-jobs", type=int, default=6)
    parser.add_argument("--overhead-jobs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="of each job")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, path = options.worker
        work(kind, Path(path), options.rounds, options.seed)
        return
    load = os.getloadavg()[0]
    counts = {
        "replicas": options.replica_jobs,
        "stages": options.stage_jobs,
        "long stages": options.long_jobs,
        "overhead": options.overhead_jobs,
    }
    found = {
        kind: [run_job(kind, options.rounds, seed) for seed in range(count)]
        for kind, count in counts.items()
    }
    write_speed(found, load)


if __name__ == "__main__":
    main()
