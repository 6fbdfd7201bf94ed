"""Groups of ranks that sum, scatter and gather tensors, of which each rank may have a piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from placer._torch import all_gather_single, reduce_scatter_single
from placer.executor.distributed.job.groups import wait_function
from placer.state_layout import piece_length


class SummingGroup(Protocol):
    """A group of ranks that have the same parameters, or pieces of them.

    Each method starts a collective, and returns the function that waits for it.
    """

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        """Sum ``tensor`` over the ranks, in place."""

    def start_scatter(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        """Fill every rank's ``part``, in order of rank, from the sum of ``whole``, which may be changed."""

    def start_gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        """Fill ``whole`` with every rank's ``part``, in order of rank; that may be a part of ``whole``."""


class GroupSum:
    """Sums over the ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        return wait_function(dist.all_reduce(tensor, group=self._group, async_op=True))

    def start_scatter(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        if "gloo" not in dist.get_backend(self._group):
            return wait_function(reduce_scatter_single(part, whole, self._group))
        # Gloo sums a copy of the whole, so this takes less memory than its own reduce-scatter.
        wait = self.start_sum(whole)

        def finish() -> None:
            wait()
            part.copy_(whole.view(self.size, -1)[self.rank])

        return finish

    def start_gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        return wait_function(all_gather_single(whole, part, self._group, async_op=True))


def gather_pieces(piece: Tensor, shape: torch.Size, group: SummingGroup) -> Tensor:
    """The tensor of this ``shape`` of which each rank of ``group``, which all call this, has a piece."""
    part = padded(piece, piece_length(shape.numel(), group.size))
    whole = part.new_empty(group.size * len(part))
    group.start_gather(whole, part)()
    return whole[: shape.numel()].view(shape)


def padded(flat: Tensor, length: int) -> Tensor:
    """``flat`` with ``length`` elements."""
    missing = length - len(flat)
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
