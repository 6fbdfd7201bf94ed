"""The ranks of a job find each other in a store that has the keys of the job before."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

import placer
from placer.runtime.distributed.rendezvous import fresh_store

RANKS = range(4)


def _start(store: Store, late: int) -> list[Store]:
    """All ranks, in threads; rank ``late`` comes after the others."""

    def join(rank: int) -> Store:
        time.sleep(0.2 if rank == late else 0)
        return fresh_store(store, rank, len(RANKS), timedelta(seconds=20))

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return list(pool.map(join, RANKS))


def test_keys_of_the_job_before_are_not_seen() -> None:
    store = HashStore()
    for start, late in enumerate((0, 1, 3)):
        stores = _start(store, late)
        assert not any(own.check(["address"]) for own in stores)
        stores[0].set("address", str(start))
        assert [own.get("address") for own in stores] == [str(start).encode()] * len(RANKS)


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()
    _start(store, 0)  # rank 2 of the job before does not stand in for this one's
    with ThreadPoolExecutor(len(RANKS)) as pool:
        first, *others = [
            pool.submit(fresh_store, store, rank, len(RANKS), timedelta(seconds=0.5))
            for rank in RANKS
            if rank != 2
        ]
        with pytest.raises(placer.PlacerError, match=r"waited 0\.5 s for rank 2, of 4"):
            first.result()
        for other in others:
            other.result()  # they were welcome
