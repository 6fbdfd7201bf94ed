"""Sums the gradients of a step's inputs over the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from placer.executor.distributed.job.groups import Groups


def sum_input_gradients(
    inputs: Sequence[Tensor],
    batched: Sequence[bool],
    boxes: Mapping[int, Tensor],
    groups: Groups,
    *,
    own_rows: bool,
    device: torch.device,
) -> None:
    """Replace the ``.grad`` of every input that requires gradients by its sum over ranks.

    This is a collective call; `CallCheck` ensures that the same inputs require gradients on all ranks, and
    are ``boxes`` there. With ``own_rows``, a ``batched`` input has the rows of one replica; any other input
    is the same on all ranks, or of a box on those with the same shard. An input that nothing depends on
    gets None.
    """
    for position, (leaf, is_batched) in enumerate(zip(inputs, batched, strict=True)):
        if not leaf.requires_grad:
            continue
        of_replica = own_rows and is_batched
        summed = [groups.row if of_replica else groups.world]
        if position in boxes:
            leaf = boxes[position]
            summed = [groups.pp] if of_replica else [groups.pp, groups.columns]
        message = torch.zeros(1 + leaf.numel(), dtype=leaf.dtype, device=device)
        if leaf.grad is not None:
            message[0] = 1  # tells that there is a gradient
            message[1:] = leaf.grad.flatten()
        for group in summed:
            dist.all_reduce(message, group=group)
        total = message[1:].view(leaf.shape).to(leaf.device)
        leaf.grad = total if message[0] != 0 else None
