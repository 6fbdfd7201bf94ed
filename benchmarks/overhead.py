"""The time overhead of placing: a training step of one stage and one replica, against the plain model.

Steps of both alternate in random order, so that other load on the machine affects both alike.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --device cuda     # larger models, on a GPU; has been run on none yet
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
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


def compare(
    model: nn.Module, x: Tensor, target: Tensor, repeats: int, device: str = "cpu"
) -> tuple[float, float]:
    """Median seconds of a step: plain, placed."""
    placed = placer.compile(copy.deepcopy(model), {"devices": [device]}, (x,))
    model, x, target = model.to(device), x.to(device), target.to(device)
    steps = {"plain": training_step(model, x, target), "placed": training_step(placed, x, target)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name in random.sample(list(steps), 2):
            _finish(device)
            start = time.perf_counter()
            steps[name]()
            _finish(device)
            if repeat >= 3:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return statistics.median(seconds["plain"]), statistics.median(seconds["placed"])


def _finish(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize()


Case = tuple[nn.Module, Tensor, Tensor]  # a model, its input, the target


def _small() -> dict[str, Case]:
    return {
        "ResNet50, 8 x 3 x 64 x 64": _images(torchvision.models.resnet50, 8, 64),
        "3D U-Net (width 8, depth 4), 1 x 1 x 48 x 48 x 48": _volume(8, 48),
    }


def _large() -> dict[str, Case]:
    """Two steps limited by the GPU, and one limited by launching kernels."""
    return {
        "ResNet50, 64 x 3 x 224 x 224": _images(torchvision.models.resnet50, 64, 224),
        "3D U-Net (width 32, depth 4), 1 x 1 x 96 x 96 x 96": _volume(32, 96),
        "ResNet-18, 2 x 3 x 224 x 224": _images(torchvision.models.resnet18, 2, 224),
    }


def _images(build: Callable[..., nn.Module], rows: int, edge: int) -> Case:
    return build(num_classes=10), torch.randn(rows, 3, edge, edge), torch.randint(0, 10, (rows,))


def _volume(width: int, edge: int) -> Case:
    cube = (edge, edge, edge)
    model = unet3d(width=width, depth=4, out_channels=3)
    return model, torch.randn(1, 1, *cube), torch.randint(0, 3, (1, *cube))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    repeats, on_gpu = given.repeats, given.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("benchmarks.overhead --device cuda needs a CUDA device, and this machine has none")
    torch.manual_seed(0)
    random.seed(0)
    device = "cuda:0" if on_gpu else "cpu"
    cases = _large() if on_gpu else _small()
    rows = []
    for name, (model, x, target) in cases.items():
        plain, placed = compare(model, x, target, repeats, device)
        rows.append([name, f"{plain * 1e3:.1f}", f"{placed * 1e3:.1f}", f"{placed / plain:.3f}"])
    write_result(
        "overhead_gpu" if on_gpu else "overhead",
        "Overhead of a placed module (1 stage, 1 replica) over the plain model",
        "python -m benchmarks.overhead" + " --device cuda" * on_gpu,
        ["training step", "plain, ms", "placed, ms", "ratio of medians"],
        rows,
        f"Medians of {repeats} steps each, alternating.",
    )


if __name__ == "__main__":
    main()
