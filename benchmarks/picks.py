"""``python -m benchmarks.picks``: is ``auto``'s answer the fastest way to train on this machine?

Every core is a device. placer measures how fast a core and the link between two are, and is asked for the
fastest way to train each model with each batch on two of them. Then that way and all others are run, one
process of one thread per device: copies, stages, both, with several schedules and numbers of micro-batches;
ways of up to four processes too, although the machine may have fewer cores. All ways of a case are built at
once and take turns in random order; a way's seconds are the least of its rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from benchmarks.distributed.timing import KEEP_FREED_MEMORY
from benchmarks.record import RESULTS, table, write_page
from examples.gpt3_ten_thousand import GPT
from examples.unet3d import unet3d
from placer.plan.store import save_plan
from placer.plan.types import Plan
from placer.search.strategy import Strategy

DEVICES = 2  # for ``auto``
BATCHES = (8, 16, 32, 64)
ROUNDS = 7
NEAR = 1.05  # of the best seconds
_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
_END = -1


class Words(nn.Module):
    """A small decoder whose scores have the words in dimension 1, as ``cross_entropy`` wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(blocks=4, width=256, heads=4, words=4096)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens).transpose(1, 2)  # type: ignore[no-any-return]


def wide() -> nn.Module:
    """100 MiB of weights and little else."""
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def vision_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=6, num_heads=4, hidden_dim=192, mlp_dim=768
    )


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    target: tuple[int, ...] = ()
    classes: int = 10
    tokens: bool = False
    batches: tuple[int, ...] = BATCHES

    def example(self, rows: int) -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        shape = (rows, *self.sample)
        x = torch.randint(0, self.classes, shape) if self.tokens else torch.randn(shape)
        return self.make(), x, torch.randint(0, self.classes, (rows, *self.target))


MODELS = {
    "ResNet-18, 64 x 64": Model(torchvision.models.resnet18, (3, 64, 64)),
    "MobileNet-V3 small, 96 x 96": Model(torchvision.models.mobilenet_v3_small, (3, 96, 96)),
    "3D U-Net, width 16, 24 x 24 x 24": Model(
        lambda: unet3d(width=16, depth=3, out_channels=3), (1, 24, 24, 24), (24, 24, 24), 3
    ),
    "vision transformer, 6 x 192": Model(vision_transformer, (3, 64, 64)),
    "GPT, 4 x 256, 128 tokens": Model(
        Words, (128,), (128,), 4096, tokens=True, batches=(4, 8, 16, 32)
    ),
    "MLP, 25 million weights": Model(wide, (2048,)),
}

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"replicas": 2},
    {"replicas": 2, "microbatches": 2},
    {"replicas": 2, "shard_state": "optimizer"},
    {"stages": 2, "microbatches": 2, "schedule": "1F1B"},
    {"stages": 2, "microbatches": 4, "schedule": "1F1B"},
    {"stages": 2, "microbatches": 4, "schedule": "InterleavedZeroBubble"},
    {"stages": 2, "microbatches": 8, "schedule": "1F1B"},
    {"replicas": 4},
    {"replicas": 2, "stages": 2, "microbatches": 2, "schedule": "1F1B"},
    {"stages": 4, "microbatches": 4, "schedule": "1F1B"},
)


def describe(plan: Plan) -> str:
    """The plan's strategy in a few words."""
    return Strategy(
        replicas=plan.replicas,
        stages=len(plan.stages),
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        shard_state=plan.shard_state,
    ).describe()


def all_plans(case: Model, rows: int, machine: Path, most: int) -> list[Plan]:
    """``auto``'s answer, and the plans of all other ways of at most so many processes."""
    model, x, target = case.example(rows)
    common: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": target, "processes": True}
    answer = placer.auto_plan(model, x, machine=str(machine), **common)
    plans = {describe(answer): answer}
    described = json.loads(machine.read_text())
    for way in WAYS:
        count = way.get("replicas", 1) * way.get("stages", 1)
        if way.get("replicas", 1) * way.get("microbatches", 1) > rows or count > most:
            continue
        sized = machine.with_name(f"machine-{count}.json")
        sized.write_text(json.dumps({**described, "devices_per_node": count}))
        spec = {"machine": str(sized), "replicas": 1, "stages": 1, "microbatches": 1, **way}
        plan = placer.make_plan(model, spec, x, **common)
        plans.setdefault(describe(plan), plan)
    return list(plans.values())


def ranks_of(plan: Plan) -> int:
    return plan.replicas * len(plan.stages)


# A job's processes.


def work(folder: Path, name: str, rows: int, port: int) -> None:
    """Build the steps of all plans for so many processes, then run whichever the store asks for."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world, rank = dist.get_world_size(), dist.get_rank()
    plans = {int(path.stem): placer.load_plan(path) for path in sorted(folder.glob("[0-9]*.json"))}
    steps = {
        number: _step(MODELS[name], rows, plan)
        for number, plan in plans.items()
        if ranks_of(plan) == world
    }
    dist.barrier()
    if rank == 0:
        store.set(f"ready {world}", "")
    turn = 0
    while (number := int(store.get(f"turn {world} {turn}"))) != _END:
        dist.barrier()
        start = time.perf_counter()
        steps[number]()
        dist.barrier()
        if rank == 0:
            store.set(f"seconds {world} {turn}", str(time.perf_counter() - start))
        turn += 1
    dist.destroy_process_group()


def _step(case: Model, rows: int, plan: Plan) -> Callable[[], None]:
    model, x, target = case.example(rows)
    placed = placer.compile(model, plan, x)
    optimizer = torch.optim.Adam(placed.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        placed.step(x, target=target, loss_fn=F.cross_entropy)
        optimizer.step()

    return step


# The process that starts the jobs.


@contextlib.contextmanager
def jobs(folder: Path, name: str, rows: int, worlds: list[int], port: int) -> Iterator[None]:
    """A job for each number of processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    work_of = ["-m", "benchmarks.picks", "--worker", str(folder), name, str(rows), str(port)]
    started = [
        subprocess.Popen([*command, f"--nproc-per-node={world}", *work_of], env=_THREAD)
        for world in worlds
    ]
    try:
        yield
        for job in started:
            if job.wait(60):
                raise RuntimeError(f"a job of {name}, {rows} rows, failed")
    finally:
        for job in started:
            job.kill()


def measure(name: str, rows: int, plans: list[Plan], rounds: int, seed: int) -> list[float]:
    """The least seconds of a step of every plan."""
    order = random.Random(seed)
    worlds = sorted({ranks_of(plan) for plan in plans})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    turns = dict.fromkeys(worlds, 0)

    def run(number: int) -> float:
        world = ranks_of(plans[number])
        store.set(f"turn {world} {turns[world]}", str(number))
        seconds = float(store.get(f"seconds {world} {turns[world]}"))
        turns[world] += 1
        return seconds

    with tempfile.TemporaryDirectory() as folder:
        for number, plan in enumerate(plans):
            save_plan(plan, Path(folder) / f"{number}.json")
        with jobs(Path(folder), name, rows, worlds, store.port):
            for world in worlds:
                store.get(f"ready {world}")
            seconds = [list[float]() for _ in plans]
            for turn in range(rounds + 2):
                for number in order.sample(range(len(plans)), len(plans)):
                    found = run(number)
                    if turn >= 2:  # the first ones warm up
                        seconds[number].append(found)
            for world in worlds:
                store.set(f"turn {world} {turns[world]}", str(_END))
    return [min(each) for each in seconds]


def describe_machine(folder: Path) -> Path:
    """Measures a core and the link between two, and writes the machine of two devices."""
    kind, machine = folder / "core.json", folder / "machine.json"
    command = [sys.executable, "-m", "placer"]
    calibrate = ["calibrate", "--device", "cpu", "-o", str(kind)]
    links = ["machine", "--measure", "--devices", str(DEVICES), "--kind", str(kind)]
    for arguments in (calibrate, [*links, "-o", str(machine)]):
        subprocess.run([*command, *arguments], check=True, env=_THREAD)
    return machine


@dataclass(frozen=True)
class Row:
    """A case: each plan with its strategy, measured and predicted seconds; the first is ``auto``'s."""

    model: str
    rows: int
    ways: list[tuple[str, float, float]]

    @property
    def loss(self) -> float:
        """The answer's measured seconds over those of the best."""
        return self.ways[0][1] / min(seconds for _, seconds, _ in self.ways)

    @property
    def cells(self) -> tuple[str, ...]:
        best, seconds, _ = min(self.ways, key=lambda way: way[1])
        pick, measured, predicted = self.ways[0]
        return (
            self.model,
            f"{self.rows}",
            pick,
            f"{predicted * 1e3:.0f}",
            f"{measured * 1e3:.0f}",
            best,
            f"{seconds * 1e3:.0f}",
            f"{self.loss:.2f}",
            f"{len(self.ways)}",
        )


_HEADER = (
    *("model", "batch", "auto's answer", "predicted ms", "measured ms"),
    *("best measured", "its ms", "answer / best", "ways"),
)


def write(rows: list[Row], load: float, most: int) -> None:
    near = sum(row.loss <= NEAR for row in rows)
    note = (
        f"The answer is within 5 % of the best way in {near} of {len(rows)} cases. Load of the machine at "
        f"the start: {load:.1f}."
    )
    title = "Whether auto's answer is the fastest way on this machine"
    lines = [*table(_HEADER, [row.cells for row in rows]), note, ""]
    write_page("picks", title, f"python -m benchmarks.picks --processes {most}", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--model", help="only models whose name has this")
    parser.add_argument("--batch", type=int, help="only this batch")
    parser.add_argument("--processes", type=int, default=4, help="only ways of so many at most")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, name, count, port = options.worker
        work(Path(folder), name, int(count), int(port))
        return
    load, found = os.getloadavg()[0], list[Row]()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        machine = describe_machine(Path(folder))
        for name, case in MODELS.items():
            for batch in case.batches:
                if options.batch not in (None, batch) or (options.model or "") not in name:
                    continue
                plans = all_plans(case, batch, machine, options.processes)
                seconds = measure(name, batch, plans, options.rounds, seed=batch)
                predicted = [plan.step_seconds or 0.0 for plan in plans]
                ways = list(zip(map(describe, plans), seconds, predicted, strict=True))
                found.append(Row(name, batch, ways))
                print(name, batch, f"{found[-1].loss:.2f}", flush=True)
                for way, least, guess in ways:
                    print(f"  {way:60} {least * 1e3:8.1f} {guess * 1e3:8.1f}", flush=True)
                raw = [{"model": r.model, "batch": r.rows, "ways": r.ways} for r in found]
                (RESULTS / "picks.json").write_text(json.dumps(raw, indent=1) + "\n")
    write(found, load, options.processes)


if __name__ == "__main__":
    main()
