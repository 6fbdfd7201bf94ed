"""Sums the gradients of the caller's inputs over the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class InputGradients:
    """The inputs of a step that require gradients; every rank gets the whole gradient.

    The stages of each micro-batch read separate leaves, so a gradient has the size of its rows. The same
    inputs must require gradients on all ranks, which `CallCheck` ensures.
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
        """The ``needed`` inputs of a micro-batch by name, detached, for the stages of this rank.

        ``first_row`` is the micro-batch's first row among the rows that this rank was given.
        """
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
        """Sum the gradients over ranks, and run the caller's backward from them; a collective call.

        With ``own_rows``, a batched input has the rows of one replica, whose ranks are the group ``row``;
        any other input is the same on all ranks of ``world``. The ``.grad`` of an input that nothing
        depends on is not changed.
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
