"""Gradients of the caller's own inputs, brought together from the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class InputGradients:
    """The inputs of a step that require gradients; every rank of ``world`` ends with the whole.

    A micro-batch's stages read leaves of their own, so that a gradient has the size of its rows.
    Rows are whole batches' (``own_rows`` false) or those of one replica, whose ranks are ``row``;
    an input that is not cut goes to all replicas.

    The same inputs must require gradients on all ranks, which `agreement` looks after.
    """

    def __init__(self, leaves: Sequence[Tensor], batched: Sequence[bool]) -> None:
        self._leaves = list(leaves)
        self._batched = list(batched)
        self._wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        self._parts: list[tuple[int, int, Tensor]] = []  # (input, its first row, what is read)

    def read(
        self,
        names: Sequence[str],
        leaves: Sequence[Tensor],
        *,
        first_row: int,
        needed: Collection[str],
    ) -> dict[str, Tensor]:
        """What the stages of this rank read of a micro-batch: the ``needed`` inputs, without their past."""
        read = {}
        for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if name in needed:
                read[name] = part = leaf.detach()
                if index in self._wanted:
                    self._parts.append((index, first_row, part.requires_grad_()))
        return read

    def deliver(
        self,
        *,
        row: dist.ProcessGroup,
        world: dist.ProcessGroup,
        own_rows: bool,
        device: torch.device,
    ) -> None:
        """Sum what arrived over the ranks and hand it on to the caller's graph; a collective call.

        An input that nothing depends on keeps its ``.grad`` as it is.
        """
        leaves, grads = [], []
        for index in self._wanted:
            leaf = self._leaves[index]
            message = torch.zeros(1 + leaf.numel(), dtype=leaf.dtype, device=device)
            whole = message[1:].view(leaf.shape)
            for position, first, part in self._parts:
                if position == index and part.grad is not None:
                    message[0] = 1
                    rows = whole[first : first + len(part)] if self._batched[index] else whole
                    rows += part.grad.to(device)
            dist.all_reduce(message, group=row if own_rows and self._batched[index] else world)
            if message[0] != 0:
                leaves.append(leaf)
                grads.append(whole.to(leaf.device))
        if leaves:
            torch.autograd.backward(leaves, grads)
