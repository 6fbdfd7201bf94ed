"""The norm of gradients that are divided between the ranks of a replica."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def total_norm(
    own: Sequence[Tensor], norm_type: float, *, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The norm over the gradients ``own`` of all ranks of ``group``, a float64 scalar on ``device``."""
    norm = nn.utils.get_total_norm(own, norm_type).to(device, torch.float64)
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    norm = norm**norm_type
    dist.all_reduce(norm, group=group)
    total: Tensor = norm ** (1 / norm_type)
    return total
