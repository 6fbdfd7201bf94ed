"""The exchange between the shards of a stage that are processes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from placer.executor.distributed.job.groups import sendable
from placer.space import Exchange, Pieces


class GroupExchange:
    """Moves pieces between the ranks of ``group``, one shard each; see `placer.space.exchange`.

    All pieces of an exchange go in one batch. None is empty, because both ends know the boxes.
    ``sent_nbytes`` counts what this rank has sent, sums as in a ring. ``everyone`` has the shards of all
    replicas, if batch norms have their statistics over replicas too.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._device, self.sent_nbytes = group, device, 0
        self._everyone = None if everyone is None else GroupExchange(everyone, device)
        self.shards = dist.get_world_size(group)
        self.local = (dist.get_rank(group),)
        self.leads = tuple(range(self.shards))

    def swap(
        self, given: Pieces, wanted: Mapping[tuple[int, int], Sequence[int]], like: Tensor
    ) -> Pieces:
        received = {key: like.new_empty(shape) for key, shape in wanted.items()}
        sent = {target: sendable(piece) for (_, target), piece in given.items()}
        self.sent_nbytes += sum(piece.nbytes for piece in sent.values())
        messages = [
            dist.P2POp(dist.isend, piece, group=self._group, group_peer=target)
            for target, piece in sorted(sent.items())
        ]
        messages += [
            dist.P2POp(dist.irecv, piece, group=self._group, group_peer=source)
            for (source, _), piece in sorted(received.items(), key=lambda item: item[0])
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received

    def sum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [self.sum_processes(part) for part in parts]

    def sum_processes(self, value: Tensor) -> Tensor:
        total = sendable(value).clone(memory_format=torch.contiguous_format)
        self.sent_nbytes += 2 * total.nbytes * (self.shards - 1) // self.shards
        dist.all_reduce(total, group=self._group)
        return total

    def of_batch_norms(self, counts: list[int]) -> tuple[Exchange, list[int]]:
        if self._everyone is None:
            return self, counts
        own = torch.zeros(self._everyone.shards, dtype=torch.int64)
        own[self._everyone.local[0]] = counts[self.local[0]]
        (total,) = self._everyone.sum([own.to(self._device)])
        return self._everyone, total.tolist()

    def move(self, value: Tensor, shard: int) -> Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    def at(self, shard: int) -> AbstractContextManager[object]:
        return nullcontext()
