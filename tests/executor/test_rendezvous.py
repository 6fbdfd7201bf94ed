"""The ranks of a job find each other in a store, which may have the keys of the job before."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

import placer
from placer.executor.distributed.job.assignment import Job
from placer.executor.distributed.job.join import start_store

RANKS = range(4)


def _start(
    store: Store, ranks: Iterable[int] = RANKS, late: int = -1, seconds: float = 20.0
) -> list[Store | placer.PeerError]:
    """What each of ``ranks`` gets, in threads; rank ``late`` comes last."""

    def join(rank: int) -> Store | placer.PeerError:
        time.sleep(0.2 if rank == late else 0)
        job = Job(rank=rank, world_size=len(RANKS), local_rank=rank)
        try:
            return start_store(store, job, limit=timedelta(seconds=seconds))
        except placer.PeerError as error:
            return error

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return list(pool.map(join, ranks))


def test_keys_of_the_job_before_are_not_seen() -> None:
    store = HashStore()
    for start, late in enumerate((0, 1, 3)):
        stores = _start(store, late=late)
        assert all(isinstance(own, Store) and not own.check(["address"]) for own in stores)
        stores[0].set("address", str(start))
        assert [own.get("address") for own in stores] == [str(start).encode()] * len(RANKS)


def test_every_rank_names_those_that_do_not_come() -> None:
    store = HashStore()
    _start(store)  # rank 2 of the job before does not stand in for this one's
    for error in _start(store, [0, 1, 3], seconds=0.5):
        assert isinstance(error, placer.PeerError)
        assert "waited 0.5 s for rank 2, of 4" in error.problem
        assert "look at the output of rank 2" in error.remedy


def test_without_rank_0_the_others_name_it() -> None:
    (error,) = _start(HashStore(), [1], seconds=0.5)
    assert "waited 0.5 s for rank 0, of 4" in str(error)


def test_a_warning_names_the_missing_rank_before_the_time_is_up() -> None:
    job = Job(rank=0, world_size=2, local_rank=0)
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(placer.PeerError):
        start_store(HashStore(), job, limit=timedelta(seconds=0.5), warn_seconds=0.1)
    (said,) = [str(warning.message) for warning in caught]
    assert said.startswith("rank 0 has waited 0.1 s in placer.compile for rank 1, of 2")
