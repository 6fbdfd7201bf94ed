"""Sums the gradients of a step's inputs over the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def sum_input_gradients(
    inputs: Sequence[Tensor],
    batched: Sequence[bool],
    *,
    row: dist.ProcessGroup,
    world: dist.ProcessGroup,
    own_rows: bool,
    device: torch.device,
) -> None:
    """Replace the ``.grad`` of every input that requires gradients by its sum over ranks.

    This is a collective call; `CallCheck` ensures that the same inputs require gradients on all ranks.
    With ``own_rows``, a ``batched`` input has the rows of one replica, whose ranks are the group ``row``;
    any other input is the same on all ranks of ``world``. An input that nothing depends on gets None.
    """
    for leaf, is_batched in zip(inputs, batched, strict=True):
        if not leaf.requires_grad:
            continue
        message = torch.zeros(1 + leaf.numel(), dtype=leaf.dtype, device=device)
        if leaf.grad is not None:
            message[0] = 1  # tells that there is a gradient
            message[1:] = leaf.grad.flatten()
        dist.all_reduce(message, group=row if own_rows and is_batched else world)
        total = message[1:].view(leaf.shape).to(leaf.device)
        leaf.grad = total if message[0] != 0 else None
