"""What placing costs in time: one stage, one replica, against the plain model; a training step.

Steps of both alternate in random order, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

import placer
from benchmarks.record import write_result
from examples.unet3d import unet3d

Step = Callable[[], None]


def training_step(model: nn.Module, x: Tensor, target: Tensor) -> Step:
    """One SGD step of ``model`` on the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model(x), target).backward()
        optimizer.step()

    return step


def compare(model: nn.Module, x: Tensor, target: Tensor, repeats: int) -> tuple[float, float]:
    """Median seconds of a step: plain, placed."""
    placed = placer.compile(model, {"devices": ["cpu"]}, (x,))
    steps = {"plain": training_step(model, x, target), "placed": training_step(placed, x, target)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name in random.sample(list(steps), 2):
            start = time.perf_counter()
            steps[name]()
            if repeat >= 3:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return statistics.median(seconds["plain"]), statistics.median(seconds["placed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    random.seed(0)
    cases = {
        "ResNet50, 8 x 3 x 64 x 64": (
            torchvision.models.resnet50(num_classes=10),
            torch.randn(8, 3, 64, 64),
            torch.randint(0, 10, (8,)),
        ),
        "3D U-Net (width 8, depth 4), 1 x 1 x 48 x 48 x 48": (
            unet3d(width=8, depth=4, out_channels=3),
            torch.randn(1, 1, 48, 48, 48),
            torch.randint(0, 3, (1, 48, 48, 48)),
        ),
    }
    rows = []
    for name, (model, x, target) in cases.items():
        plain, placed = compare(model, x, target, repeats)
        rows.append([name, f"{plain * 1e3:.1f}", f"{placed * 1e3:.1f}", f"{placed / plain:.3f}"])
    write_result(
        "overhead",
        "Overhead of a placed module (1 stage, 1 replica) over the plain model",
        "python -m benchmarks.overhead",
        ["training step", "plain, ms", "placed, ms", "ratio of medians"],
        rows,
        f"Medians of {repeats} steps each, alternating.",
    )


if __name__ == "__main__":
    main()
