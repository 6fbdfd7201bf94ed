"""One process per device against one process, DDP, averaging by hand, and pipelining by hand.

``python -m benchmarks.distributed`` starts ``torchrun`` with two processes of one thread each. All
contestants of a comparison are in the same job and take turns, in random order, so that whatever
else the machine does hits them alike; a ratio is the median over all rounds of the ratio in a round.
Where their tensors lie in memory makes 5 % for the same kernels, and stays for the life of a process: so
there are several jobs, each of which builds the contestants in another order.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

import placer
from benchmarks.record import RESULTS, write_page
from examples.unet3d import unet3d
from placer.runtime.place import CALLER
from placer.schedule import bubble, make_schedule
from placer.simulation.ranks import RankLedger

COMMAND = "python -m benchmarks.distributed"
MICROBATCHES = (1, 2, 4, 8)
# Else glibc gives freed memory back and takes it anew, which costs whom it hits 10 ms a step and more:
# one contestant or another, by what lies above it on the heap.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
Step = Callable[[], None]
Seconds = Mapping[str, list[float]]  # contestant -> of every round
loss_of = nn.CrossEntropyLoss()


def take_turns(
    contestants: Mapping[str, Callable[[], Step]], rounds: int, order: random.Random
) -> dict[str, list[float]]:
    """Seconds of every step of every contestant; all ranks start and end each together.

    Contestants are built, and take their turns, in random ``order``, the same on all ranks.
    """
    names = list(contestants)
    steps = {name: contestants[name]() for name in order.sample(names, len(names))}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name in order.sample(names, len(names)):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            if number >= 2:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def train(module: nn.Module, backward: Callable[[], Any]) -> Step:
    """A step of SGD around ``backward``."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return step


# Replicas.


def replica_cases() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    torch.manual_seed(0)
    cases: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
    # 43 MiB of gradients against more and more computation; the last is ImageNet's size
    for rows, edge in ((32, 64), (128, 64), (32, 224)):
        cases[f"ResNet-18, {rows} x 3 x {edge} x {edge}"] = (
            torchvision.models.resnet18(num_classes=10),
            torch.randn(rows, 3, edge, edge),
            torch.randint(0, 10, (rows,)),
        )
    cases["3D U-Net (width 8, depth 3), 8 x 1 x 32 x 32 x 32"] = (
        unet3d(width=8, depth=3, out_channels=3),
        torch.randn(8, 1, 32, 32, 32),
        torch.randint(0, 3, (8, 32, 32, 32)),
    )
    return cases


def replica_contestants(
    model: nn.Module, x: Tensor, target: Tensor
) -> dict[str, Callable[[], Step]]:
    """Two replicas, a batch of the same size in all: one process, placer, DDP, averaging by hand.

    "no communication" are two processes that train on half of the batch each, by themselves: what
    the machine can do (two cores share clock, cache and memory; the optimizer's part is not halved).
    """
    rank = dist.get_rank()
    rows, wanted = x.chunk(2)[rank], target.chunk(2)[rank]

    def alone(x: Tensor, target: Tensor) -> Step:
        copied = copy.deepcopy(model)
        return train(copied, lambda: loss_of(copied(x), target).backward())

    def by_placer() -> Step:
        placed = placer.compile(model, {"devices": ["cpu"], "replicas": 2}, x)
        return train(placed, lambda: placed.step(x, target=target, loss_fn=loss_of))

    def by_ddp() -> Step:
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        return train(wrapped, lambda: loss_of(wrapped(rows), wanted).backward())

    def by_averaging() -> Step:
        copied = copy.deepcopy(model)

        def average() -> None:
            loss_of(copied(rows), wanted).backward()
            for parameter in copied.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

        return train(copied, average)

    return {
        "one process": lambda: alone(x, target) if rank == 0 else lambda: None,
        "no communication": lambda: alone(rows, wanted),
        "placer": by_placer,
        "DDP": by_ddp,
        "average_gradients": by_averaging,
    }


# Stages.


def stage_model() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Eight equal blocks; four of them are half of the work, and the boundary is 8 MiB."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
        for _ in range(8)
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 16 * 16, 10))
    return model, torch.randn(256, 32, 16, 16), torch.randint(0, 10, (256,))


def stage_spec(schedule: str, microbatches: int) -> dict[str, Any]:
    layers = {str(i): "cpu:0" if i < 4 else "cpu:1" for i in range(10)}
    return {
        "devices": ["cpu:0", "cpu:1"],
        "layers": layers,
        "schedule": schedule,
        "microbatches": microbatches,
    }


def by_hand(model: nn.Sequential, x: Tensor, target: Tensor, schedule: str, count: int) -> Step:
    """The same two stages as someone writes them on ``torch.distributed.pipelining``."""
    rank = dist.get_rank()
    part = model[:4] if rank == 0 else model[4:]
    stage = pipelining.PipelineStage(copy.deepcopy(part), rank, 2, torch.device("cpu"))
    kind = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}[schedule]
    runner = kind(stage, count, loss_fn=loss_of)
    if rank == 0:
        return train(stage.submod, lambda: runner.step(x))
    return train(stage.submod, lambda: runner.step(target=target))


def stage_contestants(count: int) -> dict[str, Callable[[], Step]]:
    """Two stages by placer, by hand, and both in one process, for a number of micro-batches."""
    model, x, target = stage_model()

    def by_placer(schedule: str) -> Step:
        placed = placer.compile(model, stage_spec(schedule, count), x)
        return train(placed, lambda: placed.step(x, target=target, loss_fn=loss_of))

    def alone() -> Step:
        copied = copy.deepcopy(model)

        def accumulate() -> None:
            for rows, wanted in zip(x.chunk(count), target.chunk(count), strict=True):
                (loss_of(copied(rows), wanted) / count).backward()

        return train(copied, accumulate)

    contestants: dict[str, Callable[[], Step]] = {}
    for schedule in ("GPipe", "1F1B"):
        if schedule == "1F1B" and count == 1:
            continue  # torch wants as many micro-batches as stages
        contestants[f"placer {schedule}"] = partial(by_placer, schedule)
        contestants[f"by hand {schedule}"] = partial(by_hand, model, x, target, schedule, count)
    contestants["one process"] = alone if dist.get_rank() == 0 else lambda: lambda: None
    return contestants


def compare(kind: str, rounds: int, seed: int) -> dict[str, Seconds]:
    """One of the comparisons: case -> contestant -> seconds of every round."""
    order = random.Random(seed)
    if kind == "replicas":
        return {
            name: take_turns(replica_contestants(*case), rounds, order)
            for name, case in replica_cases().items()
        }
    return {
        str(count): take_turns(stage_contestants(count), rounds, order) for count in MICROBATCHES
    }


# Memory.


def memory_case(schedule: str, count: int, stages: int) -> tuple[nn.Module, dict[str, Any], Tensor]:
    torch.manual_seed(0)
    model = unet3d(width=8, depth=3, out_channels=3)
    spec = {
        "devices": [f"cpu:{i}" for i in range(stages)],
        "schedule": schedule,
        "microbatches": count,
    }
    return model, spec, torch.randn(8, 1, 32, 32, 32)


def measure_memory() -> list[dict[str, Any]]:
    """Peak bytes of a step on this rank, counted storage by storage on real tensors."""
    found = []
    stages = dist.get_world_size()
    for schedule in ("GPipe", "1F1B", "InterleavedZeroBubble"):
        for count in (2, 4):
            model, spec, x = memory_case(schedule, count, stages)
            target = torch.randint(0, 3, (8, 32, 32, 32))
            placed = placer.compile(model, spec, x)
            optimizer = torch.optim.Adam(placed.parameters())
            placed.step(x, target=target, loss_fn=loss_of)  # finds what crosses, on fake tensors
            optimizer.zero_grad()
            ledger = RankLedger()
            ledger.add_state((*placed.parameters(), *placed.buffers()))
            for tensor in (x, target):
                ledger.add(tensor, CALLER, kind="input")
            with ledger:
                for _ in range(2):
                    placed.step(x, target=target, loss_fn=loss_of)
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(
                {
                    "schedule": schedule,
                    "microbatches": count,
                    "stages": stages,
                    "rank": dist.get_rank(),
                    "measured": ledger.peak.nbytes,
                }
            )
    return found


def predict_memory(found: list[dict[str, Any]]) -> None:
    """Add to every entry what the plan and ``placer.simulate(…, processes=True)`` say."""
    cases = dict.fromkeys((e["schedule"], e["microbatches"], e["stages"]) for e in found)
    for schedule, count, stages in cases:
        model, spec, x = memory_case(schedule, count, stages)
        plan = placer.make_plan(model, spec, x, processes=True)
        target = torch.zeros(8 // count, 32, 32, 32, dtype=torch.long)

        def loss(output: Tensor, target: Tensor = target) -> Tensor:
            return loss_of(output, target)

        report = placer.simulate(model, plan, x, loss_fn=loss, run_on="cpu", processes=True)
        for entry in found:
            if (entry["schedule"], entry["microbatches"], entry["stages"]) == (
                schedule,
                count,
                stages,
            ):
                entry["predicted"] = report.devices[entry["rank"]].peak
                entry["planned"] = plan.devices[entry["rank"]].peak


# The page.


def work(what: str, path: Path, rounds: int, seed: int) -> None:
    """What each process of a job does; rank 0 writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any]
    if what == "memory":
        memory: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(memory, measure_memory())
        found = {"memory": [entry for rank in memory for entry in rank]}
    else:
        found = compare(what, rounds, seed)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def run_job(what: str, processes: int, rounds: int = 1, seed: int = 0) -> dict[str, Any]:
    """What a job of this size finds, in processes of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", "-m", "benchmarks.distributed"]
        command += ["--worker", what, str(path), "--rounds", str(rounds), "--seed", str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
        subprocess.run(command, check=True, env=environment)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def ratios(jobs: Sequence[Seconds], over: str, under: str) -> list[float]:
    """The first's seconds over the second's in every round of every job, in ascending order."""
    return sorted(
        a / b for seconds in jobs for a, b in zip(seconds[over], seconds[under], strict=True)
    )


def ratio(jobs: Sequence[Seconds], over: str, under: str) -> float:
    """The median over all rounds."""
    return statistics.median(ratios(jobs, over, under))


def with_bounds(jobs: Sequence[Seconds], over: str, under: str) -> str:
    """The median, and where it is with 95 % confidence: between the n/2 ± sqrt(n)-th of n rounds.

    The interval of order statistics for a quantile (Conover, Practical Nonparametric Statistics,
    1999, section 3.2): 0.98 sqrt(n), rounded up.
    """
    found = ratios(jobs, over, under)
    low = max(math.floor(len(found) / 2 - math.sqrt(len(found))), 0)
    return f"{statistics.median(found):.3f} ({found[low]:.2f} to {found[-1 - low]:.2f})"


def by_case(jobs: Sequence[Mapping[str, Seconds]]) -> dict[str, list[Seconds]]:
    """Per case what each job found."""
    return {name: [job[name] for job in jobs] for name in jobs[0]}


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def milliseconds(jobs: Sequence[Seconds], name: str) -> str:
    return f"{statistics.median(x for seconds in jobs for x in seconds[name]) * 1e3:.0f}"


def write_speed(
    replicas: Sequence[Mapping[str, Seconds]], stages: Sequence[Mapping[str, Seconds]], load: float
) -> None:
    kept = ", ".join(f"`{name}={value}`" for name, value in KEEP_FREED_MEMORY.items())
    rounds = len(stages[0]["1"]["one process"])
    lines = [
        f"Two processes of one thread each, gloo on loopback; {len(replicas)} and {len(stages)} jobs of",
        f"{rounds} rounds, contestants in turn; a ratio is the median over all rounds (in brackets: where",
        f"it is with 95 % confidence). Load average at the start: {load:.1f}.",
        "",
        f"Freed memory stays with its process ({kept}): else glibc gives some back and takes it anew,",
        "thousands of page faults a step, for one contestant or another by what lies above it on the heap.",
        "",
        "## Two replicas: throughput, the whole batch of the same size",
        "",
    ]
    header = ["training step", "one process, ms", "placer dp=2, ms", "over one process"]
    header += ["DDP over one process", "no communication over one process"]
    header += ["placer over DDP", "placer over average_gradients"]
    rows = [
        [
            name,
            milliseconds(jobs, "one process"),
            milliseconds(jobs, "placer"),
            f"{ratio(jobs, 'one process', 'placer'):.2f}",
            f"{ratio(jobs, 'one process', 'DDP'):.2f}",
            f"{ratio(jobs, 'one process', 'no communication'):.2f}",
            with_bounds(jobs, "DDP", "placer"),
            with_bounds(jobs, "average_gradients", "placer"),
        ]
        for name, jobs in by_case(replicas).items()
    ]
    lines += table(header, rows)
    lines += [
        "No communication: two processes, each training by itself on half of the batch. What is over",
        "one process there is what this machine's two cores can do; no way to sum gradients is faster.",
        "",
    ]
    lines += ["## Two stages: step time over the same stages by hand; efficiency", ""]
    header = ["micro-batches", "schedule", "placer, ms", "by hand, ms", "placer / by hand"]
    header += ["efficiency", "of the schedule"]
    rows = []
    for count, jobs in by_case(stages).items():
        for schedule in ("GPipe", "1F1B"):
            if f"placer {schedule}" not in jobs[0]:
                continue
            rows.append(
                [
                    count,
                    schedule,
                    milliseconds(jobs, f"placer {schedule}"),
                    milliseconds(jobs, f"by hand {schedule}"),
                    with_bounds(jobs, f"placer {schedule}", f"by hand {schedule}"),
                    f"{ratio(jobs, 'one process', f'placer {schedule}') / 2:.3f}",
                    f"{1 - bubble(make_schedule(schedule, 2, int(count))):.3f}",
                ]
            )
    lines += table(header, rows)
    lines += [
        "Efficiency is the time of one process for the same micro-batches over twice the step's; that",
        "of the schedule is 1 - bubble. [Plot](distributed.png).",
        "",
    ]
    write_page("distributed", "One process per device: speed", COMMAND, lines)
    plot(by_case(stages))


def write_memory(memory: list[dict[str, Any]]) -> None:
    lines = [
        "The most bytes that each rank holds in a training step of a 3D U-Net (width 8, depth 3),",
        "8 x 1 x 32 x 32 x 32, Adam, counted storage by storage on real tensors in real processes.",
        "",
    ]
    rows = [
        [
            entry["schedule"],
            str(entry["microbatches"]),
            f"{entry['rank']} of {entry['stages']}",
            f"{entry['planned'] / 2**20:.1f}",
            f"{entry['predicted'] / 2**20:.1f}",
            f"{entry['measured'] / 2**20:.1f}",
            f"{entry['measured'] / entry['planned'] - 1:+.1%}",
            f"{entry['measured'] / entry['predicted'] - 1:+.1%}",
        ]
        for entry in sorted(
            memory,
            key=lambda e: (e["stages"], e["schedule"], e["microbatches"], e["rank"]),
        )
    ]
    header = ["schedule", "micro-batches", "rank", "plan, MiB", "simulated with the loss, MiB"]
    header += ["counted, MiB", "counted over plan", "counted over simulated"]
    lines += table(header, rows)
    lines += [
        "The plan is `placer.make_plan(model, spec, args, processes=True)`: torch's engine on fake",
        "tensors with a stand-in for the loss, which a plan does not know. Simulated is",
        "`placer.simulate(…, loss_fn=…, processes=True)`, with the cross-entropy that is counted.",
        "It counts the target of each micro-batch in flight as the last rank's, where in the job it is",
        "the caller's own.",
        "",
    ]
    write_page(
        "distributed_memory",
        "One process per device: memory of a rank",
        f"{COMMAND} memory",
        lines,
    )


def plot(stages: Mapping[str, Sequence[Seconds]]) -> None:
    """Measured efficiency beside the schedule's own, over the number of micro-batches."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    counts = [int(count) for count in stages]
    ideal = [1 - bubble(make_schedule("GPipe", 2, count)) for count in counts]
    axes.plot(counts, ideal, color="0.5", linestyle="--", label="1 - bubble")
    for schedule, marker in (("GPipe", "o"), ("1F1B", "s")):
        known = [c for c in counts if f"placer {schedule}" in stages[str(c)][0]]
        found = [ratio(stages[str(c)], "one process", f"placer {schedule}") / 2 for c in known]
        axes.plot(known, found, marker=marker, label=f"placer, {schedule}")
    axes.set(xlabel="micro-batches", ylabel="efficiency of 2 stages", xscale="log", ylim=(0, 1))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(RESULTS / "distributed.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("speed", "memory"), default="speed")
    parser.add_argument("--replica-jobs", type=int, default=3)
    parser.add_argument("--stage-jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="of each job")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, path = options.worker
        work(kind, Path(path), options.rounds, options.seed)
    elif options.what == "memory":
        memory = [e for count in (2, 4) for e in run_job("memory", count)["memory"]]
        predict_memory(memory)
        write_memory(memory)
    else:
        load = os.getloadavg()[0]
        counts = {"replicas": options.replica_jobs, "stages": options.stage_jobs}
        found = {
            kind: [run_job(kind, 2, options.rounds, seed) for seed in range(count)]
            for kind, count in counts.items()
        }
        write_speed(found["replicas"], found["stages"], load)


if __name__ == "__main__":
    main()
