"""Predicted against simulated peaks over the models of the equivalence suite, cell by cell.

A cell is a model at 1-4 stages, 1, 2 or 4 micro-batches (inference: 1 or 2), fp32 or bf16 autocast,
training or inference. The optimizer goes round sgd, sgd_momentum and adam from cell to cell, the
schedule round GPipe and 1F1B. The suite's smallest models hold a few kilobytes, where the scalars of
a step are percents; they are given larger inputs here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import nn

import placer
from benchmarks.record import write_result
from examples.unet3d import unet3d
from tests import models

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

MODELS: dict[str, Callable[[], Case]] = {
    "keywords and dict results": lambda: (
        models.KeywordModel(),
        (torch.randn(1200, 6, requires_grad=True),),
        {"scale": torch.randn(1200, 1), "twice": True},
    ),
    "tied transformer": lambda: (
        models.TiedTransformer(width=64, length=32, vocabulary=100),
        (torch.randint(0, 100, (16, 32)),),
        {},
    ),
    "in place": lambda: (models.InPlace(), (torch.randn(8, 2, 64, 64),), {}),
    "recurrent": lambda: (models.Recurrent(), (torch.randn(120, 40, 3),), {}),
    "dropout": lambda: (models.ConvNet(), (torch.randn(256, 1, 8, 8),), {}),
    "3D U-Net, group norm": lambda: _unet("group"),
    "3D U-Net, batch norm": lambda: _unet("batch"),
    "3D U-Net, instance norm": lambda: _unet("instance"),
    "resnet18": lambda: (
        torchvision.models.resnet18(num_classes=5),
        (torch.randn(8, 3, 64, 64),),
        {},
    ),
    "r3d_18": lambda: _video(torchvision.models.video.r3d_18),
    "mc3_18": lambda: _video(torchvision.models.video.mc3_18),
    "r2plus1d_18": lambda: _video(torchvision.models.video.r2plus1d_18),
    "lraspp": lambda: (
        torchvision.models.segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=3
        ),
        (torch.randn(4, 3, 128, 128),),
        {},
    ),
}
_OPTIMIZERS = ("sgd", "sgd_momentum", "adam")


def _unet(norm: str) -> Case:
    return unet3d(width=8, depth=3, norm=norm), (torch.randn(4, 1, 32, 32, 32),), {}


def _video(build: Callable[..., nn.Module]) -> Case:
    return build(num_classes=4), (torch.randn(4, 3, 8, 32, 32),), {}


def differences(
    case: Case, *, training: bool, precision: str, deadline: float = float("inf")
) -> list[float]:
    """Simulated / predicted - 1 of every stage of every cell."""
    model, args, kwargs = case
    model.train(training)
    found: list[float] = []
    cells = itertools.product((1, 2, 3, 4), (1, 2, 4) if training else (1, 2))
    for number, (stages, microbatches) in enumerate(cells):
        if time.monotonic() > deadline:
            break
        spec = {
            "devices": [f"cuda:{i}" for i in range(stages)],
            "microbatches": microbatches,
            "schedule": ("GPipe", "1F1B")[number % 2],
            "optimizer": _OPTIMIZERS[number % 3],
            "precision": precision,
            "training": training,
        }
        plan = placer.make_plan(model, spec, args, kwargs)
        report = placer.simulate(model, plan, args, kwargs)
        found += [device.peak / device.predicted - 1 for device in report.devices]
    return found


def rows() -> Iterator[list[object]]:
    for name, build in MODELS.items():
        torch.manual_seed(0)
        case = build()
        for training, precision in itertools.product((True, False), ("fp32", "bf16")):
            found = differences(case, training=training, precision=precision)
            beyond = sum(abs(error) > 0.01 for error in found)
            row = [
                name,
                "training" if training else "inference",
                precision,
                len(found),
                f"{max(found):+.2%}",
                f"{min(found):+.2%}",
                beyond,
            ]
            print(row, flush=True)
            yield row


def main() -> None:
    write_result(
        "memory_matrix",
        "Predicted against simulated peaks, over the models of the equivalence suite",
        "python -m benchmarks.memory --matrix",
        [
            "model",
            "mode",
            "precision",
            "stages compared",
            "most above prediction",
            "most below prediction",
            "beyond 1%",
        ],
        rows(),
        "1-4 stages x 1, 2, 4 micro-batches (inference: 1, 2); simulated / predicted - 1 of every "
        "stage. Optimizers go round sgd, sgd_momentum, adam, schedules round GPipe, 1F1B.",
    )


if __name__ == "__main__":
    main()
