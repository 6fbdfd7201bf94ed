"""Which rows of a data set make up each batch, and which of them each replica loads."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from placer.errors import PlacerError


class ReplicaSampler(Sampler[list[int]]):
    """Batches of indices for ``DataLoader(dataset, batch_sampler=…)``: this replica's rows of each.

    The batches are the same for every number of replicas: an order of all rows drawn from
    ``seed + epoch``, cut every ``batch_size`` rows. Replicas take consecutive rows of a batch, as
    evenly as they go; all stages of a replica take the same. No row is repeated or left out, but for
    ``drop_last``, which leaves out a last, smaller batch. Unlike ``DistributedSampler`` nothing is
    padded: `step` weighs uneven rows.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        num_replicas: int,
        replica_index: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise PlacerError(
                "sampler",
                f"{type(dataset).__name__} has no length, so its rows cannot be dealt out",
                "have the data set itself yield this process's rows, of index, shares = "
                "placed.own_share",
            )
        last = len(dataset) % batch_size if batch_size > 0 else 0
        smallest = last if last and not drop_last else batch_size
        if smallest < num_replicas:
            raise PlacerError(
                "sampler",
                f"a batch of {smallest} rows is not enough for {num_replicas} replicas",
                "choose a larger batch_size: it counts the rows of all replicas"
                if batch_size < num_replicas
                else "choose another batch_size, or drop_last=True",
            )
        self._num_rows = len(dataset)
        self._batch_size = batch_size
        self._num_replicas = num_replicas
        self._replica_index = replica_index
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        self._first_batch = 0

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Choose the order of the rows for the next iteration, and the batch that it starts with.

        ``first_batch`` is for going on in the middle of an epoch after `placer.load`.
        """
        self._epoch = epoch
        self._first_batch = first_batch

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        whole, rest = divmod(self._num_rows, self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = (
            torch.randperm(self._num_rows, generator=generator).tolist()
            if self._shuffle
            else list(range(self._num_rows))
        )
        for batch in range(self._first_batch, len(self)):
            rows = order[batch * self._batch_size : (batch + 1) * self._batch_size]
            yield rows[share_of(len(rows), self._num_replicas, self._replica_index)]


def share_of(num_rows: int, num_replicas: int, replica_index: int) -> slice:
    """A replica's rows of ``num_rows``; sizes differ by one at the most (``torch.tensor_split``).

    >>> [share_of(7, 3, index) for index in range(3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    size, rest = divmod(num_rows, num_replicas)
    start = replica_index * size + min(replica_index, rest)
    return slice(start, start + size + (replica_index < rest))
