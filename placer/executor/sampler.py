"""Batches of a data set's rows, and the rows of each batch that a replica loads."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from placer.errors import PlacerError


class ReplicaSampler(Sampler[list[int]]):
    """Batches of indices for ``DataLoader(dataset, batch_sampler=…)``: this replica's rows of each.

    The batches do not depend on the number of replicas: all rows are shuffled with the seed
    ``seed + epoch`` and split every ``batch_size`` rows. Each replica takes consecutive rows of a batch,
    as evenly as possible; all ranks of a replica take the same. No row is repeated. None is left out,
    except that ``drop_last`` drops a last batch that is smaller. Unlike ``DistributedSampler`` this pads
    nothing, because `step` weights slices by their numbers of rows.
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
                f"{type(dataset).__name__} has no length, so its rows cannot be divided",
                "have the data set itself yield this process's rows: index, shares = "
                "placed.own_share",
            )
        last = len(dataset) % batch_size if batch_size > 0 else 0
        smallest = last if last and not drop_last else batch_size
        if smallest < num_replicas:
            raise PlacerError(
                "sampler",
                f"a batch of {smallest} rows is not enough for {num_replicas} replicas",
                "choose a larger batch_size, which counts the rows of all replicas"
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

    @property
    def sampler(self) -> ReplicaSampler:
        """Itself: Lightning calls `set_epoch` of a batch sampler's ``sampler``."""
        return self

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Set the epoch of the next iteration, which seeds its shuffle, and the batch it starts with.

        Use ``first_batch`` to continue in the middle of an epoch after `placer.load`.
        """
        self._epoch = epoch
        self._first_batch = first_batch

    def __len__(self) -> int:
        """The number of batches in an epoch."""
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
            # The first replicas have one row more, as in ``torch.tensor_split``.
            size, rest = divmod(len(rows), self._num_replicas)
            start = self._replica_index * size + min(self._replica_index, rest)
            yield rows[start : start + size + (self._replica_index < rest)]
