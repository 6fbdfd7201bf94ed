"""What the ranks tell each other at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from placer.runtime.distributed.inputs import InputGradients

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def sum_losses(
    losses: Sequence[Tensor],
    inputs: InputGradients,
    *,
    replica_index: int,
    world: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """The loss of the whole batch, on every rank; it is computed where the last stages are.

    Raises ``PlacerError`` on every rank when not all want the gradients of the same inputs.
    """
    message = torch.tensor([0.0, 0.0, *inputs.wanted], dtype=torch.float64, device=device)
    if losses:
        loss = torch.stack(list(losses)).sum()
        message[0] = loss
        if replica_index == 0:
            message[1] = _DTYPES.index(loss.dtype)
    dist.all_reduce(message, group=world)
    kind, *counts = message[1:].tolist()
    inputs.check(counts, dist.get_world_size(world))
    return message[0].to(_DTYPES[int(kind)])


def share(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of ``group`` the values that its first rank has, in a message per data type."""
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        by_kind.setdefault(buffer.dtype, []).append(buffer)
    for alike in by_kind.values():
        flat = torch.cat([b.reshape(-1) for b in alike])
        dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
        if dist.get_rank(group):
            for buffer, piece in zip(alike, flat.split([b.numel() for b in alike]), strict=True):
                buffer.copy_(piece.view_as(buffer))
