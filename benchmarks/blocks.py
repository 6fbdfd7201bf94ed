"""``python -m benchmarks.blocks``: costs from a few of a model's equal blocks, and from all of them.

CPU seconds for one micro-batch in training (bf16, kernels of a GPU), the least of three runs in turns. Both
tables of costs are compared. Models are on ``meta``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchvision import models

from benchmarks.deep import GPT
from benchmarks.record import write_result
from placer.cost import CostEstimates, CostTable
from placer.program import Program, lower
from placer.program.blocks import find_repeats

RUNS = 3
_IMAGE = torch.empty(2, 3, 224, 224, device="meta")


class Scan(nn.Module):
    """Layers that go step by step over a sequence."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 16) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.inner:
            decay, drive = linear(x).sigmoid().chunk(2, -1)
            h, found = torch.zeros_like(drive[:, 0]), []
            for t in range(x.shape[1]):
                h = decay[:, t] * h + drive[:, t]
                found.append((h * x[:, t]).tanh())
            x = torch.stack(found, 1) + x
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "GPT, 96 blocks": (
        lambda: GPT(96),
        torch.zeros(1, 1024, dtype=torch.long, device="meta"),
    ),
    "scan, 256 steps x 4 blocks": (lambda: Scan(4), torch.empty(4, 256, 8, device="meta")),
    "ViT-B": (models.vit_b_16, _IMAGE),
    "Swin-B": (models.swin_b, _IMAGE),
    "ConvNeXt-B": (models.convnext_base, _IMAGE),
    "MViT-v2 S": (models.video.mvit_v2_s, torch.empty(2, 3, 16, 224, 224, device="meta")),
    "ResNet101": (models.resnet101, _IMAGE),
}


def _timed(program: Program, x: Tensor) -> tuple[float, CostTable]:
    start = time.process_time()
    table = CostEstimates(program)([x], precision="bf16", kernels="cuda")
    return time.process_time() - start, table


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, (build, x) in CASES.items():
        with torch.device("meta"):
            program = lower(build(), (x,))
        some, every = [], []
        for _ in range(RUNS):
            some.append(_timed(program, x))
            with patch("placer.cost.estimate.shorten", return_value=None):
                every.append(_timed(program, x))
        a, b = some[-1][1], every[-1][1]
        same = all(
            getattr(a, f.name) == getattr(b, f.name) for f in fields(CostTable) if f.name != "work"
        )
        repeats = ", ".join(f"{r.count} x {r.period}" for r in find_repeats(program))
        times = [min(seconds for seconds, _ in found) for found in (every, some)]
        shown = [f"{t:.2f}" for t in times]
        rows.append([name, len(program.order), repeats or "none", *shown, "yes" if same else "NO"])
    write_result(
        "blocks",
        "Costs of models with equal blocks",
        "python -m benchmarks.blocks",
        [
            "model",
            "nodes",
            "equal blocks x nodes",
            "all blocks, CPU s",
            "four, CPU s",
            "equal tables",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
