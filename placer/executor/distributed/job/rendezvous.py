"""How the ranks of a job find each other, before there is a process group.

They meet in a key-value store: that of ``torchrun``'s agent, or one that rank 0 hosts at
MASTER_ADDR:MASTER_PORT. Each rank sets a key when it has come, and waits for the keys of the others.
While it waits it looks whether a rank has left the reason why it failed, and warns now and then
which ranks are missing.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from placer.errors import PeerError
from placer.executor.distributed.job.call_check import name_ranks

StoreFinder = Callable[[], Store | None]

_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
POLL_SECONDS = 0.05  # between two looks at the store
_WARN_SECONDS = 30.0  # the first warning; each further one comes after twice the time
_LOST_SECONDS = 1.0  # how often a rank that waits looks for closed connections
_CONNECT_SECONDS = 1.0
_RECONNECT_SECONDS = 5.0  # how long a rank whose store is lost looks for another one


class TorchrunStore:
    """The store of ``torchrun``'s agent, without the keys of a job that was there before.

    ``torchrun`` starts a job anew after a failure (``--max-restarts``) and hands the new processes the
    store of the old ones, with the old addresses in it: they connect to processes that have ended
    (https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.15). ``RESTART_COUNT`` does
    not tell the jobs apart, as each host counts its own. So the ranks agree on a prefix of this start:

        rank r   come/r = N, a number of its own    waits for welcome/N, which nobody set before
        rank 0   reads come/r, old or new           welcome/N = P, the prefix of this start

    Rank 0 answers again and again, until all have come: an old N does no harm, as nobody waits for it.
    """

    def __init__(
        self, find_store: StoreFinder, rank: int, world_size: int, start: str = ""
    ) -> None:
        """``start`` numbers the starts that the ranks make one after the other in one process."""
        self._find_store = find_store
        self._rank = rank
        self._world_size = world_size
        self._start = start
        self._number = uuid.uuid4().hex
        self._answered: dict[int, bytes] = {}
        self._store: Store | None = None

    def __call__(self) -> Store | None:
        """The store, under a prefix that all ranks of this start, and no others, have.

        None as long as rank 0 has not answered. On rank 0 each call answers those who have come.
        """
        store = self._find_store()
        if store is None:
            return None
        store = PrefixStore(f"placer/rendezvous/{self._start}", store)
        if self._rank == 0:
            self._answer(store)
            return PrefixStore(self._number, store)
        if self._store is None:
            welcome = f"welcome/{self._number}"
            store.set(f"come/{self._rank}", self._number)
            if store.check([welcome]):
                self._store = PrefixStore(store.get(welcome).decode(), store)
        return self._store

    def _answer(self, store: Store) -> None:
        for rank in range(1, self._world_size):
            if store.check([f"come/{rank}"]):
                number = store.get(f"come/{rank}")
                if self._answered.get(rank) != number:
                    store.set(f"welcome/{number.decode()}", self._number)
                    self._answered[rank] = number


class TcpStore:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 hosts unless ``torchrun``'s agent does."""

    def __init__(self, *, hosts: bool, timeout: timedelta) -> None:
        self._hosts = hosts
        self._timeout = timeout
        self._store: Store | None = None

    def __call__(self) -> Store | None:
        """The store; None as long as nothing listens there. Returns within about a second.

        Connects anew where the connection is lost: rank 0 hosts another store for another ``compile``.
        Raises ``RuntimeError`` when the port is taken, ``ValueError`` when no address is given.
        """
        if self._store is not None and not self._hosts:
            try:
                self._store.check(["any"])
            except dist.DistError:
                self._store = None
        if self._store is None:
            address, port = _address()
            if self._hosts:
                address = "localhost"  # what others call this host need not be known here
            elif not _listens(address, port):  # asked first: torch would wait, and log every try
                return None
            self._store = _TCP_STORE(
                address,
                port,
                is_master=self._hosts,
                timeout=self._timeout,
                wait_for_workers=False,
                multi_tenant=True,  # the program may make another in this process
            )
        return self._store


def is_torchrun_store() -> bool:
    """Does an agent of ``torchrun`` host the store?"""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_hosted_here(store: Store | None, rank: int) -> bool:
    """Does ``store`` end with this process? As is usual, rank 0 hosts it where no agent does."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return rank == 0 and isinstance(store, _TCP_STORE) and not is_torchrun_store()


def meet(
    find_store: StoreFinder,
    rank: int,
    world_size: int,
    *,
    limit: timedelta,
    raise_if_told: Callable[[], None] = lambda: None,
    find_lost: Callable[[], Sequence[int]] = tuple,
    warn_seconds: float = _WARN_SECONDS,
) -> Store:
    """The store that ``find_store`` finds, when all ranks have come to it.

    ``raise_if_told`` raises what a rank that failed has left there; ``find_lost`` says which ranks
    have closed their connections to this one.

    Warns after ``warn_seconds`` which ranks are missing, and again each time the wait has doubled.
    Raises ``PeerError`` after ``limit``, or when a rank is lost.
    """
    start = time.monotonic()
    look_seconds = _LOST_SECONDS
    others = [other for other in range(world_size) if other != rank]
    last_found: float | None = None  # when the store was there; None before it ever was
    while True:
        seconds = time.monotonic() - start
        missing = [0]  # nobody else answers for the store
        with suppress(dist.DistError):  # the store is lost
            store = find_store()
            if store is not None:
                last_found = seconds
                store.set(f"here/{rank}", "")
                raise_if_told()
                if not others or store.check([f"here/{other}" for other in others]):
                    return store
                if seconds > min(warn_seconds, limit.total_seconds()):
                    missing = [r for r in others if not store.check([f"here/{r}"])]
                    if not missing:
                        return store
        if last_found is not None and seconds > last_found + _RECONNECT_SECONDS:
            raise _store_lost(rank)
        if seconds > look_seconds:
            look_seconds = seconds + _LOST_SECONDS
            if lost := find_lost():
                raise _rank_lost(rank, lost)
        if seconds > limit.total_seconds():
            raise PeerError(
                f"rank {rank}",
                f"waited {limit.total_seconds():g} s for {name_ranks(missing)}, of {world_size}",
                f"look at the output of {name_ranks(missing)}, and whether the hosts reach each other"
                f"{_at()}",
            )
        if seconds > warn_seconds:
            warnings.warn(
                f"rank {rank} has waited {warn_seconds:g} s in placer.compile for "
                f"{name_ranks(missing)}, of {world_size}{_at()}; it goes on waiting, "
                f"{limit.total_seconds():g} s in all",
                RuntimeWarning,
                stacklevel=2,
            )
            warn_seconds *= 2
        time.sleep(POLL_SECONDS)


def _address() -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"the environment variable {missing[0]} is not set")
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _listens(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), _CONNECT_SECONDS):
        return True
    return False


def _at() -> str:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f" (at {address}:{port})" if address and port else ""


def _store_lost(rank: int) -> PeerError:
    host = "torchrun's agent" if is_torchrun_store() else "rank 0"
    return PeerError(
        f"rank {rank}",
        f"lost the connection to {host}, which ended before all ranks had come to placer.compile",
        f"look at the output of {host} for the first error",
    )


def _rank_lost(rank: int, lost: Sequence[int]) -> PeerError:
    return PeerError(
        f"rank {rank}",
        f"lost the connection to {name_ranks(lost)}, which ended before all ranks had come to "
        "placer.compile",
        f"look at the output of {name_ranks(lost)} for the first error",
    )
