"""Gradients of the caller's own inputs, brought together from the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from placer.errors import PlacerError
from placer.runtime.distributed.boundary import BoundaryFinder


class InputGradients:
    """The inputs of a step that require gradients; every rank of ``world`` ends with the whole.

    A micro-batch's stages read leaves of their own, so that a gradient has the size of its rows.
    Rows are whole batches' (``own_rows`` false) or those of one replica, whose ranks are ``row``;
    an input that is not cut goes to all replicas.

    The same inputs must require gradients on all ranks. They tell each other in the message that
    ends a step, which costs nothing. Where that would be too late, because it depends on them which
    values have gradients to send back, they do before the step (`agree`).
    """

    def __init__(
        self, leaves: Sequence[Tensor], batched: Sequence[bool], names: Sequence[str]
    ) -> None:
        self._leaves = list(leaves)
        self._names = list(names)
        self._batched = list(batched)
        self._wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        self._parts: list[tuple[int, int, Tensor]] = []  # (input, its first row, what is read)

    def read(self, index: int, first_row: int, piece: Tensor) -> Tensor:
        """What the stages of this rank read of input ``index``: ``piece``, without its past."""
        part = piece.detach()
        if index in self._wanted:
            self._parts.append((index, first_row, part.requires_grad_()))
        return part

    @property
    def wanted(self) -> list[float]:
        """Per input 1.0 if it requires gradients on this rank; what all ranks add up."""
        return [float(index in self._wanted) for index in range(len(self._leaves))]

    def check(self, counts: Sequence[float], num_ranks: int) -> None:
        """Raise ``PlacerError`` if some ranks only want the gradient of an input.

        ``counts`` are the sums of `wanted` over the ranks, so that all of them raise, or none.
        """
        for name, count in zip(self._names, counts, strict=True):
            if 0 < count < num_ranks:
                raise PlacerError(
                    f"input {name}",
                    f"requires gradients on {count:g} of {num_ranks} ranks only, and each rank "
                    "computes a part of them",
                    "call requires_grad_() on all ranks, or on none",
                )

    def agree(
        self, finder: BoundaryFinder, piece: Sequence[Tensor], world: dist.ProcessGroup
    ) -> None:
        """Compare before the step what ranks want, if values cross that may have gradients by it alone.

        That are values of floating point that have none without: behind frozen stages, or behind
        none that has parameters. Whether it is so is a matter of the model, hence the same on all
        ranks; ``piece`` is a micro-batch. Raises as `check`.
        """
        if not any(leaf.is_floating_point() for leaf in piece):
            return
        without = finder.find([leaf.detach() for leaf in piece], grad=True)
        crossing = (w for i in range(len(without.boundaries)) for w in without.wires(i))
        if any(wire.dtype.is_floating_point and not wire.requires_grad for wire in crossing):
            counts = torch.tensor(self.wanted, device=finder.device)
            dist.all_reduce(counts, group=world)
            self.check(counts.tolist(), dist.get_world_size(world))

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
