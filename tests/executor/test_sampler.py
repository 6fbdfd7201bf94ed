"""Which rows each replica loads: every row once, and the same batches for every number of replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import placer
from placer.executor.sampler import ReplicaSampler

ROWS = range(23)


def _batches(
    replicas: int, *, epoch: int = 0, first_batch: int = 0, **options: bool
) -> list[list[int]]:
    """The replicas' rows of each batch, side by side."""
    samplers = [
        ReplicaSampler(ROWS, 5, num_replicas=replicas, replica_index=i, seed=3, **options)
        for i in range(replicas)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch, first_batch)
    columns = list(zip(*samplers, strict=True))
    for parts in columns:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
    return [[row for part in parts for row in part] for parts in columns]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_batches_do_not_depend_on_the_replicas(replicas: int) -> None:
    whole = _batches(1)
    assert _batches(replicas) == whole
    assert [len(batch) for batch in whole] == [5, 5, 5, 5, 3]
    assert sorted(row for batch in whole for row in batch) == list(ROWS)
    assert _batches(replicas, epoch=1) != whole
    assert _batches(replicas, first_batch=3) == whole[3:]
    assert _batches(replicas, drop_last=True) == whole[:4]
    straight = _batches(replicas, shuffle=False)
    assert [row for batch in straight for row in batch] == list(ROWS)


def test_length_is_that_of_a_whole_epoch() -> None:
    model = placer.compile(nn.Linear(2, 2), {"devices": ["cpu:0"], "replicas": 2}, torch.ones(4, 2))
    data = TensorDataset(torch.arange(23.0))
    for drop_last, expected in ((False, 5), (True, 4)):
        sampler = model.sampler(data, 5, drop_last=drop_last)
        assert len(sampler) == len(list(DataLoader(data, batch_sampler=sampler))) == expected


def test_too_few_rows_for_the_replicas() -> None:
    share = {"num_replicas": 4, "replica_index": 0}
    with pytest.raises(placer.PlacerError, match="a batch of 3 rows is not enough for 4") as caught:
        ReplicaSampler(ROWS, 5, **share)
    assert "drop_last=True" in caught.value.remedy
    assert len(ReplicaSampler(ROWS, 5, drop_last=True, **share)) == 4
    with pytest.raises(placer.PlacerError, match="which counts the rows of all replicas"):
        ReplicaSampler(ROWS, 2, **share)

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    with pytest.raises(placer.PlacerError, match="Endless has no length"):
        ReplicaSampler(Endless(), 2, **share)  # type: ignore[arg-type]


def test_lightning_finds_where_to_set_the_epoch() -> None:
    sampler = ReplicaSampler(range(16), 4, num_replicas=1, replica_index=0)
    first = list(sampler)
    sampler.sampler.set_epoch(1)
    assert list(sampler) != first
