"""Models and specs that the tests on the simulated accelerator have in common."""

from __future__ import annotations

from typing import Any

import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unet3d import unet3d

D = torch.float64
TWO = {"devices": ["cuda:0", "cuda:1"]}
HOW: dict[str, dict[str, Any]] = {
    "two stages": {},
    "GPipe": {"microbatches": 2},
    "1F1B": {"microbatches": 4, "schedule": "1F1B"},
    "interleaved": {"microbatches": 4, "schedule": "Interleaved1F1B"},
    "zero bubble": {"microbatches": 4, "schedule": "InterleavedZeroBubble"},
    "replicas": {"replicas": 2, "microbatches": 2, "schedule": "1F1B"},
    "recomputed": {"checkpoint": ["**"], "microbatches": 2},
    "offloaded": {"offload": ["**"]},
    "offloaded beside the kernels": {
        "offload": ["**"], "offload_overlap": True, "microbatches": 2, "schedule": "1F1B"
    },
    "recomputed and offloaded": {
        "checkpoint": ["**"], "offload": ["**"], "offload_overlap": True, "microbatches": 2
    },
    "deferred": {"batch_norm": "deferred", "microbatches": 2, "replicas": 2},
}  # fmt: skip


class Mixed(nn.Module):
    """A skip, a weight that two stages read, a buffer, a constant, and a tensor that ``forward`` makes.

    Its layers go back and forth between two devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.d, self.skip = nn.Linear(16, 5), nn.Linear(16, 5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.shift = torch.full((16,), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        kept = F.relu(self.a(x))
        steps = torch.arange(16, device=x.device, dtype=x.dtype)
        hidden = self.b(kept) * self.scale + self.shift + steps
        hidden = F.gelu(self.c(hidden)) + self.b.weight.sum(0) / 100
        return self.d(hidden) + self.skip(kept)


LAYERS = {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0", "d": "cuda:1", "skip": "cuda:1"}


def mixed() -> tuple[nn.Module, Tensor, Tensor]:
    """The model, an input and a target of 12 rows."""
    torch.manual_seed(1)
    return Mixed().to(D), torch.randn(12, 6, dtype=D), torch.randint(0, 5, (12,))


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A model in float64 and an input."""
    torch.manual_seed(0)
    if name == "tied transformer":
        return models.TiedTransformer().to(D), torch.randint(0, 17, (8, 6))
    if name == "in place":
        return models.InPlace().to(D), torch.randn(8, 2, 5, 5, dtype=D)
    if name == "recurrent":
        return models.Recurrent().to(D), torch.randn(8, 4, 3, dtype=D)
    norm = name.removeprefix("U-Net, ")
    return unet3d(width=4, depth=3, norm=norm).to(D), torch.randn(4, 1, 8, 8, 8, dtype=D)


NETWORKS = ["U-Net, batch", "U-Net, group", "tied transformer", "in place", "recurrent"]
