"""The ranks of a job find each other in a store, which may have the keys of the job before."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

import placer
from placer.executor.distributed.failures import broadcast, heartbeat
from placer.executor.distributed.failures.broadcast import FailureBroadcast
from placer.executor.distributed.failures.heartbeat import Heartbeat
from placer.executor.distributed.job import rendezvous
from placer.executor.distributed.job.assignment import Job
from placer.executor.distributed.job.join import store_for_start
from placer.executor.distributed.job.rendezvous import StoreFinder, TorchrunStore, meet

RANKS = range(4)


def _start(
    finder_of: Callable[[int], StoreFinder],
    ranks: range | list[int] = RANKS,
    late: int = -1,
    seconds: float | None = None,
) -> list[Store | placer.PeerError]:
    """What ``meet`` returns or raises on each of ``ranks``, in threads; rank ``late`` comes last.

    It waits for half a second where not all come.
    """
    if seconds is None:
        seconds = 20.0 if len(ranks) == len(RANKS) else 0.5

    def join(rank: int) -> Store | placer.PeerError:
        time.sleep(0.2 if rank == late else 0)
        find_store = finder_of(rank)
        failures = FailureBroadcast(rank, len(RANKS), "test", find_store=find_store)
        try:
            return meet(
                find_store,
                rank,
                len(RANKS),
                limit=timedelta(seconds=seconds),
                raise_if_told=failures.raise_if_told,
            )
        except placer.PeerError as error:
            failures.await_readers()  # as `failure_told` does: rank 0 must answer those that come later
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(join, ranks))


def _torchrun(store: Store) -> Callable[[int], StoreFinder]:
    return lambda rank: TorchrunStore(lambda: store, rank, len(RANKS))


def test_keys_of_the_job_before_are_not_seen() -> None:
    store = HashStore()
    for start, late in enumerate((0, 1, 3)):
        stores = _start(_torchrun(store), late=late)
        assert not any(own.check(["address"]) for own in stores)
        stores[0].set("address", str(start))
        assert [own.get("address") for own in stores] == [str(start).encode()] * len(RANKS)


def test_every_rank_names_those_that_do_not_come() -> None:
    store = HashStore()
    _start(_torchrun(store))  # rank 2 of the job before does not stand in for this one's
    for error in _start(_torchrun(store), [0, 1, 3]):
        assert isinstance(error, placer.PeerError)
        assert "waited 0.5 s for rank 2, of 4" in error.problem
        assert "look at the output of rank 2" in error.remedy


def test_without_rank_0_the_others_name_it() -> None:
    (error,) = _start(_torchrun(HashStore()), [1])
    assert "waited 0.5 s for rank 0, of 4" in str(error)


def test_a_warning_names_the_missing_rank_before_the_time_is_up() -> None:
    store = HashStore()
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(placer.PeerError):
        meet(lambda: store, 0, 2, limit=timedelta(seconds=0.5), warn_seconds=0.1)
    said = [str(warning.message) for warning in caught]
    assert len(said) == 3, said  # after 0.1, 0.2 and 0.4 s
    assert said[0].startswith("rank 0 has waited 0.1 s in placer.compile for rank 1, of 2")


@pytest.mark.parametrize("rank", RANKS)
def test_what_a_rank_that_fails_before_it_has_come_has_told_is_raised_by_all(rank: int) -> None:
    """Also by those that come after it."""
    store = HashStore()
    _start(_torchrun(store))  # nor does a message of the job before reach this one
    _fail(_torchrun(store), rank)
    found = _start(_torchrun(store), [r for r in RANKS if r != rank])
    assert all("waited 0.5 s" in str(error) for error in found), "it left before rank 0 answered"
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(_fail, _torchrun(store), rank, patience_seconds=20.0)
        found = _start(_torchrun(store), [r for r in RANKS if r != rank], seconds=20.0)
        failing.result()
    for error in found:
        assert isinstance(error, placer.PeerError), error
        assert str(error).startswith(f"rank {rank}, devices: are none")


def _fail(
    finder_of: Callable[[int], StoreFinder], rank: int, patience_seconds: float = 0.3
) -> None:
    failures = FailureBroadcast(
        rank, len(RANKS), "test", find_store=finder_of(rank), patience_seconds=patience_seconds
    )
    failures.tell_failure(placer.PlacerError("devices", "are none", "name some"))
    failures.await_readers()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], StoreFinder]:
    """The store of ranks that were started by hand, in this process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return lambda rank: store_for_start(_job(rank), "compile 7")


def _job(rank: int) -> Job:
    return Job(rank=rank, world_size=len(RANKS), local_rank=rank)


def test_processes_started_by_hand_meet_in_the_store_of_rank_0(
    by_hand: Callable[[int], StoreFinder],
) -> None:
    stores = _start(by_hand, late=0)
    stores[1].set("said by rank 1", "yes")
    assert stores[2].get("said by rank 1") == b"yes"


def test_a_store_that_is_lost_with_rank_0_ends_the_wait(
    by_hand: Callable[[int], StoreFinder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_RECONNECT_SECONDS", 0.1)
    hosted = by_hand(0)
    assert hosted() is not None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_start, by_hand, [1])
        time.sleep(0.1)
        del hosted
        (error,) = waiting.result()
    assert "lost the connection to rank 0, which ended before all ranks" in str(error)


def test_rank_0_may_fail_to_compile_and_try_again(by_hand: Callable[[int], StoreFinder]) -> None:
    """Others may come to the second try while the store of the first is still there."""
    first, later = by_hand(0), by_hand(1)
    assert first() is not None and later() is not None
    del first
    with ThreadPoolExecutor(len(RANKS)) as pool:
        finders = {0: by_hand(0), 1: later, 2: by_hand(2), 3: by_hand(3)}
        stores = list(
            pool.map(lambda rank: _start(finders.__getitem__, [rank], seconds=20.0), RANKS)
        )
    assert all(isinstance(store, Store) for (store,) in stores), stores


def test_a_program_that_exits_in_compile_has_told_so(
    by_hand: Callable[[int], StoreFinder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_compiled", itertools.repeat(7))
    hosted = by_hand(0)
    assert hosted() is not None
    with pytest.raises(SystemExit), broadcast.failure_told(_job(1)):
        raise SystemExit
    failures = FailureBroadcast(0, len(RANKS), "compile 7", find_store=hosted)
    with pytest.raises(placer.PeerError, match="rank 1: SystemExit"):
        failures.raise_if_told()


def test_a_rank_that_stops_beating_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that goes on, nor one that has not come yet."""
    monkeypatch.setattr(heartbeat, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "_LOOK_SECONDS", 0.1)
    store = HashStore()
    watching, stopping, living = (Heartbeat("job", rank, len(RANKS)) for rank in range(3))
    with living.beating(lambda: store, patience_seconds=1.0):
        with stopping.beating(lambda: store, patience_seconds=1.0):
            time.sleep(0.2)
            assert watching.silent_ranks(lambda: store) == []
        end = time.monotonic() + 20.0
        while not (lost := watching.silent_ranks(lambda: store)):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert lost == [1]


def test_beats_begin_when_there_is_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, and after the store is gone, they do no harm."""
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.01)
    found: list[Store] = []
    find_store: StoreFinder = lambda: found[0] if found else None  # noqa: E731
    with Heartbeat("job", 1, 2).beating(find_store, patience_seconds=0.05):
        assert Heartbeat("job", 0, 2).silent_ranks(lambda: None) == []
        found.append(HashStore())
        end = time.monotonic() + 20.0
        while not found[0].check(["job/beats/1"]):
            assert time.monotonic() < end
            time.sleep(0.01)
