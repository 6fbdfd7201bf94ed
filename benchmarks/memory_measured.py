"""Simulated against measured peaks on the CPU: the models of the equivalence suite and larger ones.

A cell is a model in training, with its saved activations kept, recomputed or offloaded, or in
inference; with momentum or Adam, whole or in three micro-batches, in fp32 or bf16 autocast. The
suite's smallest models get larger inputs: recomputing a region keeps the state of the random number
generator, 5 kB on the CPU, which the ledger does not count. Of the suite's video models there is
r3d_18.

    python -m benchmarks.memory --measured [MODEL ...]

measures the models that are named, or all, and keeps the rows of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torchvision
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import placer
from benchmarks import memory_matrix
from benchmarks.allocator import allocator_peaks
from benchmarks.cpu_workspaces import counting_workspaces
from benchmarks.loss import LOSS
from benchmarks.record import RESULTS, write_page
from examples.unet3d import unet3d
from placer.cost import mean_square
from tests import models

MIB = 2**20
Case = memory_matrix.Case

LARGER: dict[str, Callable[[], Case]] = {
    "keywords and dict results": lambda: (
        models.KeywordModel(),
        (torch.randn(48000, 6),),
        {"scale": torch.randn(48000, 1), "twice": True},
    ),
    "tied transformer": lambda: (
        models.TiedTransformer(width=64, length=32, vocabulary=100),
        (torch.randint(0, 100, (64, 32)),),
        {},
    ),
    "in place": lambda: (models.InPlace(), (torch.randn(48, 2, 64, 64),), {}),
    "recurrent": lambda: (models.Recurrent(), (torch.randn(480, 40, 3),), {}),
    "dropout": lambda: (models.ConvNet(), (torch.randn(3072, 1, 8, 8),), {}),
    "ResNet50, 4 x 128^2": lambda: (
        torchvision.models.resnet50(),
        (torch.randn(4, 3, 128, 128),),
        {},
    ),
    "3D U-Net (width 16) 64^3": lambda: (
        unet3d(width=16, depth=4),
        (torch.randn(1, 1, 64, 64, 64),),
        {},
    ),
    "r3d_18, 2 x 8 x 64^2": lambda: (
        torchvision.models.video.r3d_18(),
        (torch.randn(2, 3, 8, 64, 64),),
        {},
    ),
    "ViT-B/16, 2 x 224^2": lambda: (
        torchvision.models.vit_b_16(),
        (torch.randn(2, 3, 224, 224),),
        {},
    ),
}
_VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18")
MODELS = {
    name: build for name, build in memory_matrix.MODELS.items() if name not in _VIDEO
} | LARGER

_TRAINING: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd_momentum"},
    "Adam, three micro-batches": {"optimizer": "adam", "microbatches": 3},
    "Adam, bf16": {"optimizer": "adam", "precision": "bf16"},
}
_INFERENCE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, three micro-batches": {"precision": "bf16", "microbatches": 3},
}
WAYS: dict[str, dict[str, Any]] = {
    **{way: memory_matrix.WAYS[way] for way in ("kept", "recomputed", "offloaded")},
    "inference": {"training": False},
}
_ROWS = RESULTS / "memory_measured.json"


def cells(case: Case, way: str) -> Iterator[dict[str, Any]]:
    """Bytes of every cell of a model: predicted, simulated, measured, and with oneDNN's workspaces."""
    model, args, kwargs = case
    args = tree_map_only(Tensor, Tensor.detach, args)
    model.train(way != "inference")
    rows = next(x.size(0) for x in tree_leaves(args) if isinstance(x, Tensor))
    for name, fields in (_INFERENCE if way == "inference" else _TRAINING).items():
        if fields.get("microbatches", 1) > rows or (fields.get("precision") and way == "offloaded"):
            continue
        plan = placer.make_plan(
            model, {"devices": ["cpu:0"], **LOSS, **WAYS[way], **fields}, args, kwargs
        )
        (without,) = placer.simulate(model, plan, args, kwargs).devices
        with counting_workspaces():
            (simulated,) = placer.simulate(model, plan, args, kwargs).devices
        peaks = allocator_peaks(model, plan, args, kwargs, loss_fn=mean_square)
        yield {
            "cell": name,
            "predicted": without.predicted,
            "without": without.peak,
            "simulated": simulated.peak,
            "measured": peaks.tensors,
            "everything": peaks.everything,
        }


def measure(names: Collection[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Cells by model and way: measured anew for ``names``, for the others as they were."""
    known = json.loads(_ROWS.read_text()) if _ROWS.exists() else {}
    for name in names:
        torch.manual_seed(0)
        case = MODELS[name]()
        known[name] = {way: list(cells(case, way)) for way in WAYS}
        print(name, {way: _worst(found) for way, found in known[name].items()}, flush=True)
        _ROWS.write_text(json.dumps(known, indent=1) + "\n")
    return {name: known[name] for name in MODELS if name in known}


def _off(cell: dict[str, Any]) -> float:
    return float(cell["simulated"] / cell["measured"] - 1)


def _worst(found: list[dict[str, Any]]) -> str:
    off = max(map(_off, found), key=abs)
    return f"**{off:+.2%}**" if abs(off) > 0.01 else f"{off:+.2%}"


def main(names: Sequence[str] = ()) -> None:
    """Write ``results/memory_measured.json`` as the cells come, and the page."""
    found = measure(names or list(MODELS))
    named = [(n, c) for n, ways in found.items() for group in ways.values() for c in group]
    every = [cell for _, cell in named]
    within = sum(abs(_off(cell)) <= 0.01 for cell in every)
    without = min((c["without"] / c["measured"] - 1, name) for name, c in named)
    predicted = max(abs(c["predicted"] / c["without"] - 1) for c in every)
    short = sum(c["without"] / c["measured"] < 0.99 for c in every)
    lines = [
        f"Simulated and measured agree within 1% in {within} of {len(every)} cells; those that do "
        f"not are in bold. Plans do not count the workspaces of the CPU's kernels, as this does: without "
        f"them {short} cells are more than 1% below what was measured, by {-without[0]:.0%} at most "
        f"({without[1]}). Predicted and simulated without them differ by {predicted:.2%} at most.",
        "",
        f"| model | {' | '.join(WAYS)} | peak, MiB | oneDNN besides |",
        f"|{' --- |' * (len(WAYS) + 3)}",
    ]
    for name, ways in found.items():
        measured = [cell for group in ways.values() for cell in group]
        sizes = [cell["measured"] / MIB for cell in measured]
        besides = max(cell["everything"] / cell["measured"] - 1 for cell in measured)
        worst = " | ".join(_worst(ways[way]) for way in WAYS)
        span = f"{min(sizes):.1f} to {max(sizes):.1f}"
        lines.append(f"| {name} | {worst} | {span} | +{besides:.0%} |")
    note = (
        "Simulated / measured - 1, the largest over training with momentum, with Adam in three "
        "micro-batches and with Adam in bf16 (the last not offloaded), and over inference in fp32 "
        "and in bf16 in three micro-batches; three micro-batches where there are as many rows. "
        "Second step. Simulated with the workspaces of benchmarks/cpu_workspaces.py. Measured are the "
        "allocator's events through "
        "`torch.profiler(profile_memory=True)`, without what oneDNN takes and gives back inside one "
        "convolution, LSTM or product of matrices in half precision: the last column has the most "
        "that it adds to a cell's peak. Every cell is in memory_measured.json."
    )
    missing = [name for name in MODELS if name not in found]
    if missing:
        note += f" Not measured yet: {'; '.join(missing)}."
    command = "python -m benchmarks.memory --measured"
    title = "Peak bytes of a real step on the CPU"
    write_page("memory_measured", title, command, [*lines, "", note, ""])
