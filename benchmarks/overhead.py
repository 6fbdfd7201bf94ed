"""The time overhead of placing: a training step of one stage and one replica, against the plain model.

Steps of all alternate in random order, so that other load on the machine affects them alike. Some models
are so small that a step is limited by Python and by launching kernels: they show what placing costs the host.

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
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import placer
from benchmarks.memory_gpu import GPT2
from benchmarks.record import write_result
from examples.unet3d import unet3d

_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its batch, whose classes are in the dimension ``classes_dim`` of its output."""

    model: nn.Module
    x: Tensor
    target: Tensor
    bf16: bool = False
    classes_dim: int = 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean cross entropy."""
        return cross_entropy(output.movedim(self.classes_dim, 1), target)


def compare(case: Case, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds of an SGD step: of the plain model, of ``placed(x)`` and of ``placed.step``."""
    x, target = case.x.to(device), case.target.to(device)
    plain = copy.deepcopy(case.model).to(device)
    spec = {"devices": [device], "precision": "bf16" if case.bf16 else "fp32"}
    called, stepped = (placer.compile(copy.deepcopy(case.model), spec, (x,)) for _ in range(2))

    def backward(model: nn.Module, autocast: bool) -> None:
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=autocast):
            output = model(x)
        case.loss(output, target).backward()

    def step() -> None:
        stepped.step(x, target=target, loss_fn=case.loss, reduction="mean")

    runs = {
        "plain": (plain, lambda: backward(plain, case.bf16)),
        "placed(x)": (called, lambda: backward(called, False)),  # it has a precision of its own
        "placed.step": (stepped, step),
    }
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=1e-3) for name, (m, _) in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + _WARM_UP):
        for name in random.sample(list(runs), len(runs)):
            _finish(device)
            start = time.perf_counter()
            optimizers[name].zero_grad()
            runs[name][1]()
            optimizers[name].step()
            _finish(device)
            if repeat >= _WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _finish(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize()


def _small() -> dict[str, Case]:
    return {
        "ResNet50, 8 x 3 x 64 x 64": _images(torchvision.models.resnet50, 8, 64),
        "3D U-Net (width 8, depth 4), 1 x 1 x 48 x 48 x 48": _volume(8, 48),
        "ResNet-18, 2 x 3 x 32 x 32": _images(torchvision.models.resnet18, 2, 32),
        "12 transformer blocks of width 32, 2 x 8": _words(2, 8, width=32, heads=4, words=50),
        "the same, bf16": _words(2, 8, bf16=True, width=32, heads=4, words=50),
    }


def _large() -> dict[str, Case]:
    """Two steps limited by the GPU, the others more or less by launching kernels."""
    return {
        "ResNet50, 64 x 3 x 224 x 224": _images(torchvision.models.resnet50, 64, 224),
        "3D U-Net (width 32, depth 4), 1 x 1 x 96 x 96 x 96": _volume(32, 96),
        "ResNet-18, 2 x 3 x 224 x 224": _images(torchvision.models.resnet18, 2, 224),
        "GPT-2 size, 8 x 512": _words(8, 512),
        "GPT-2 size, 8 x 512, bf16": _words(8, 512, bf16=True),
    }


def _images(build: Callable[..., nn.Module], rows: int, edge: int) -> Case:
    x, target = torch.randn(rows, 3, edge, edge), torch.randint(0, 10, (rows,))
    return Case(model=build(num_classes=10), x=x, target=target)


def _volume(width: int, edge: int) -> Case:
    cube = (edge, edge, edge)
    model = unet3d(width=width, depth=4, out_channels=3)
    return Case(model=model, x=torch.randn(1, 1, *cube), target=torch.randint(0, 3, (1, *cube)))


def _words(rows: int, length: int, *, bf16: bool = False, **sizes: Any) -> Case:
    model = GPT2(**sizes)
    x, target = (torch.randint(model.words.num_embeddings, (rows, length)) for _ in range(2))
    return Case(model=model, x=x, target=target, bf16=bf16, classes_dim=-1)


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
    for name, case in cases.items():
        plain, *placed = compare(case, repeats, device).values()
        cells = [f"{seconds * 1e3:.1f} ({seconds / plain:.3f})" for seconds in placed]
        rows.append([name, f"{plain * 1e3:.1f}", *cells])
    write_result(
        "overhead_gpu" if on_gpu else "overhead",
        "Overhead of a placed module (1 stage, 1 replica) over the plain model",
        "python -m benchmarks.overhead" + " --device cuda" * on_gpu,
        ["training step", "plain, ms", "placed(x)", "placed.step"],
        rows,
        f"Medians of {repeats} SGD steps each, alternating; in brackets the ratio to the plain model.",
    )


if __name__ == "__main__":
    main()
