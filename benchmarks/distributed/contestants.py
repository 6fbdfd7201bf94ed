"""Training steps to compare: by placer, by DDP, by hand, and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

import placer
from benchmarks.distributed.timing import Step
from examples.unet3d import unet3d

MICROBATCHES = (1, 2, 4, 8)
LONG_ROWS = 1024  # of a step that takes a second
loss_of = nn.CrossEntropyLoss()


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
    for rows in (8, 16):
        cases[f"3D U-Net (width 8, depth 3), {rows} x 1 x 32 x 32 x 32"] = (
            unet3d(width=8, depth=3, out_channels=3),
            torch.randn(rows, 1, 32, 32, 32),
            torch.randint(0, 3, (rows, 32, 32, 32)),
        )
    return cases


def replica_contestants(
    model: nn.Module, x: Tensor, target: Tensor
) -> dict[str, Callable[[], Step]]:
    """Two replicas, a batch of the same size in all: one process, placer, DDP, averaging by hand.

    "no communication" are two processes that train separately on half of the batch each: what
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


def stage_model(
    *, rows: int = 256, channels: int = 32, edge: int = 16
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Eight equal blocks; four of them are half of the work, and the boundary of 256 rows is 8 MiB."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()
        )
        for _ in range(8)
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels * edge**2, 10))
    return model, torch.randn(rows, channels, edge, edge), torch.randint(0, 10, (rows,))


def stage_spec(schedule: str, microbatches: int) -> dict[str, Any]:
    layers = {str(i): "cpu:0" if i < 4 else "cpu:1" for i in range(10)}
    return {
        "devices": ["cpu:0", "cpu:1"],
        "layers": layers,
        "schedule": schedule,
        "microbatches": microbatches,
    }


def by_hand(model: nn.Sequential, x: Tensor, target: Tensor, schedule: str, count: int) -> Step:
    """The same two stages, written by hand on ``torch.distributed.pipelining``."""
    rank = dist.get_rank()
    part = model[:4] if rank == 0 else model[4:]
    stage = pipelining.PipelineStage(copy.deepcopy(part), rank, 2, torch.device("cpu"))
    kind = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}[schedule]
    runner = kind(stage, count, loss_fn=loss_of)
    if rank == 0:
        return train(stage.submod, lambda: runner.step(x))
    return train(stage.submod, lambda: runner.step(target=target))


def stage_contestants(
    count: int, model: nn.Sequential, x: Tensor, target: Tensor
) -> dict[str, Callable[[], Step]]:
    """Two stages by placer, by hand, and both in one process, for a number of micro-batches."""

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


# What a step costs beside its kernels.


def overhead_cases() -> dict[str, dict[str, Callable[[], Step]]]:
    """Steps of a few kB, with almost no computation, under the names "placer" and "by hand"."""
    tiny = stage_model(rows=16, channels=4, edge=4)
    replicas = replica_contestants(*tiny)
    cases = {"2 replicas": {"placer": replicas["placer"], "by hand": replicas["DDP"]}}
    for schedule, count in (("GPipe", 1), ("GPipe", 8), ("1F1B", 8)):
        stages = stage_contestants(count, *tiny)
        cases[f"2 stages, {schedule}, {count} micro-batch{'es' if count > 1 else ''}"] = {
            name: stages[f"{name} {schedule}"] for name in ("placer", "by hand")
        }
    return cases
