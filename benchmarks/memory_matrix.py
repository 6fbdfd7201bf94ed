"""Predicted against simulated peaks over the models of the equivalence suite, cell by cell.

A cell is a model at 1-4 stages and 1-4 micro-batches, fp32 or bf16 autocast, training or inference;
training in fp32 also with every top-level layer recomputed, with its saved activations offloaded,
and both. The optimizer goes round sgd, sgd_momentum and adam from cell to cell, the schedule round
GPipe and 1F1B, so that over four cells each meets each. The suite's smallest models take a few
kilobytes, of which the scalars of a step are some percent; they get larger inputs here.

    python -m benchmarks.memory --matrix [MODEL ...]

measures the named models, or all, and keeps the rows of the others.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torchvision
from torch import nn

from benchmarks.loss import LOSS
from benchmarks.record import RESULTS, write_result
from examples.unet3d import unet3d
from placer.planner.build import build_plan
from placer.program import flatten_call, lower
from placer.simulation import simulate_plan
from placer.spec import load_spec
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
WAYS: dict[str, dict[str, list[str]]] = {
    "kept": {},
    "recomputed": {"checkpoint": ["*"]},
    "offloaded": {"offload": ["*"]},
    "recomputed and offloaded": {"checkpoint": ["*"], "offload": ["*"]},
}
MODES = (
    *(
        (training, precision, "kept")
        for training in (True, False)
        for precision in ("fp32", "bf16")
    ),
    *((True, "fp32", way) for way in WAYS if way != "kept"),
)
_ROWS = RESULTS / "memory_matrix.json"


def _unet(norm: str) -> Case:
    return unet3d(width=8, depth=3, norm=norm), (torch.randn(4, 1, 32, 32, 32),), {}


def _video(build: Callable[..., nn.Module]) -> Case:
    return build(num_classes=4), (torch.randn(4, 3, 8, 32, 32),), {}


def cells_of(way: str) -> list[tuple[int, int, int]]:
    """The cells of a model in one mode: their numbers, stages and micro-batches."""
    counts = (1, 2, 3, 4)
    cells = itertools.product(counts, counts if way == "kept" else (1, 2))
    return [(number, *cell) for number, cell in enumerate(cells)]


def differences(
    case: Case,
    *,
    training: bool,
    precision: str,
    way: str = "kept",
    cells: Sequence[tuple[int, int, int]] = (),
) -> list[float]:
    """Simulated / predicted - 1 of every stage of ``cells``, all of `cells_of` if none are given."""
    model, args, kwargs = case
    model.train(training)
    program = lower(model, args, kwargs)
    inputs = flatten_call(program.call, args, kwargs)
    found: list[float] = []
    for number, stages, microbatches in cells or cells_of(way):
        spec = load_spec(
            {
                "devices": [f"cuda:{i}" for i in range(stages)],
                "microbatches": microbatches,
                "schedule": ("GPipe", "1F1B")[(number + number // 4) % 2],
                "optimizer": _OPTIMIZERS[number % 3],
                "precision": precision,
                "training": training,
                **WAYS[way],
                **LOSS,
            }
        )
        plan = build_plan(program, spec, inputs)
        report = simulate_plan(program, plan, inputs)
        found += [device.peak / device.predicted - 1 for device in report.devices]
    return found


def rows(names: Collection[str]) -> Iterator[list[object]]:
    """Rows of the table: measured anew for ``names``, unchanged for the others."""
    known = json.loads(_ROWS.read_text()) if _ROWS.exists() else {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        case = build()
        for training, precision, way in MODES:
            key = f"{name}, {'training' if training else 'inference'}, {precision}, {way}"
            if name in names or key not in known:
                found = differences(case, training=training, precision=precision, way=way)
                beyond = sum(abs(error) > 0.01 for error in found)
                known[key] = [len(found), f"{max(found):+.2%}", f"{min(found):+.2%}", beyond]
                print(key, known[key], flush=True)
                _ROWS.write_text(json.dumps(known, indent=1) + "\n")
            yield [name, *key.split(", ")[-3:], *known[key]]


def main(names: Sequence[str] = ()) -> None:
    write_result(
        "memory_matrix",
        "Predicted against simulated peaks, over the models of the equivalence suite",
        "python -m benchmarks.memory --matrix",
        [
            "model",
            "mode",
            "precision",
            "saved activations",
            "stages compared",
            "most above prediction",
            "most below prediction",
            "beyond 1%",
        ],
        rows(names or list(MODELS)),
        "1-4 stages x 1-4 micro-batches (1, 2 where activations are not kept); simulated / predicted "
        "- 1 of every stage. Optimizers go round sgd, sgd_momentum, adam, schedules round GPipe, 1F1B.",
    )
