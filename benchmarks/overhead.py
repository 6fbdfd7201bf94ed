"""The time overhead of placing: a training step of one stage and one replica, against the plain model.

Steps of all alternate in random order, so that other load on the machine affects them alike. Some models
are so small that a step is limited by Python and by launching kernels: they show what placing costs the host.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --device cuda     # larger models, on a GPU

Every model has its own process, and the page is written after each.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import placer
from benchmarks.fresh import (
    Job,
    Report,
    Row,
    add_options,
    answer,
    choose,
    measure_all,
    take_turn,
)
from benchmarks.memory_gpu import GPT2
from benchmarks.record import RESULTS, table
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
    if device != "cpu":
        take_turn()
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


def _images(build: Callable[..., nn.Module], rows: int, *size: int) -> Case:
    x, target = torch.randn(rows, 3, *size), torch.randint(0, 10, (rows,))
    return Case(model=build(num_classes=10), x=x, target=target)


def _volume(width: int, edge: int) -> Case:
    cube = (edge, edge, edge)
    model = unet3d(width=width, depth=4, out_channels=3)
    return Case(model=model, x=torch.randn(1, 1, *cube), target=torch.randint(0, 3, (1, *cube)))


def _words(rows: int, length: int, *, bf16: bool = False, **sizes: Any) -> Case:
    model = GPT2(**sizes)
    x, target = (torch.randint(model.words.num_embeddings, (rows, length)) for _ in range(2))
    return Case(model=model, x=x, target=target, bf16=bf16, classes_dim=-1)


_models = torchvision.models
SMALL: dict[str, Callable[[], Case]] = {
    "ResNet50, 8 x 3 x 64 x 64": lambda: _images(_models.resnet50, 8, 64, 64),
    "3D U-Net (width 8, depth 4), 1 x 1 x 48 x 48 x 48": lambda: _volume(8, 48),
    "ResNet-18, 2 x 3 x 32 x 32": lambda: _images(_models.resnet18, 2, 32, 32),
    "r3d_18, 1 x 3 x 4 x 32 x 32": lambda: _images(_models.video.r3d_18, 1, 4, 32, 32),
    "12 transformer blocks of width 32, 2 x 8": lambda: _words(2, 8, width=32, heads=4, words=50),
    "the same, bf16": lambda: _words(2, 8, bf16=True, width=32, heads=4, words=50),
}
# Two steps limited by the GPU, the others more or less by launching kernels.
LARGE: dict[str, Callable[[], Case]] = {
    "ResNet50, 64 x 3 x 224 x 224": lambda: _images(_models.resnet50, 64, 224, 224),
    "3D U-Net (width 32, depth 4), 1 x 1 x 96 x 96 x 96": lambda: _volume(32, 96),
    "ResNet-18, 2 x 3 x 224 x 224": lambda: _images(_models.resnet18, 2, 224, 224),
    "r3d_18, 4 x 3 x 16 x 112 x 112": lambda: _images(_models.video.r3d_18, 4, 16, 112, 112),
    "GPT-2 size, 8 x 512": lambda: _words(8, 512),
    "GPT-2 size, 8 x 512, bf16": lambda: _words(8, 512, bf16=True),
}


def _job(values: Mapping[str, Any]) -> Row:
    torch.manual_seed(0)
    random.seed(0)
    device = "cuda:0" if values["device"] == "cuda" else "cpu"
    found = compare((LARGE | SMALL)[values["case"]](), values["repeats"], device)
    return {"seconds": found}


def lines_of(rows: Sequence[Row]) -> list[str]:
    """The table: medians, and their ratios to the plain model's."""
    cells = []
    for row in rows:
        plain, *placed = row["seconds"].values()
        ratios = [f"{seconds * 1e3:.1f} ({seconds / plain:.3f})" for seconds in placed]
        cells.append([row["case"], f"{plain * 1e3:.1f}", *ratios])
    repeats = sorted({row["repeats"] for row in rows})
    return [
        *table(["training step", "plain, ms", "placed(x)", "placed.step"], cells),
        f"Medians of {' or '.join(map(str, repeats))} SGD steps each, alternating; in brackets the ratio to "
        "the plain model. The goal on a GPU is 1.02, and 1.05 where launching kernels is the limit.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=", ".join([*LARGE, *SMALL]))
    parser.add_argument("--repeats", type=int, default=60)
    add_options(parser, device="cpu")
    given = parser.parse_args()
    if given.job is not None:
        answer(given.job, lambda: _job(given.job))
        return
    on_gpu = given.device == "cuda"
    names = choose(parser, given.cases, LARGE if on_gpu else SMALL)
    report = Report(
        module="benchmarks.overhead",
        page="overhead_gpu" if on_gpu else "overhead",
        title="Overhead of a placed module (1 stage, 1 replica) over the plain model",
        command="python -m benchmarks.overhead" + " --device cuda" * on_gpu,
        lines=lines_of,
    )
    given.output = given.output or RESULTS
    common = {"device": given.device, "repeats": given.repeats}
    mode = "expandable" if on_gpu else None  # for the plain model too
    jobs = [Job(key=name, values={**common, "case": name}, allocator=mode) for name in names]
    measure_all(report, lambda _: jobs, given)


if __name__ == "__main__":
    main()
