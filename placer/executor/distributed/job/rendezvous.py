"""Lets the ranks of a job find each other before there is a process group.

They meet in a key-value store: that of ``torchrun``'s agent, or one that rank 0 hosts at
MASTER_ADDR:MASTER_PORT. Each rank sets a key when it arrives, and waits for the keys of the others.
While it waits it checks whether another rank has reported a failure, and warns from time to time which
ranks are missing.
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
POLL_SECONDS = 0.05  # between two reads of the store
_WARN_SECONDS = 30.0  # the first warning; each further one comes after twice the time
_LOST_SECONDS = 1.0  # between two checks for closed connections
_CONNECT_SECONDS = 1.0
_RECONNECT_SECONDS = 5.0  # how long a rank that has lost the store waits for another one


class TorchrunStore:
    """The store of ``torchrun``'s agent, under a key prefix that is new for each start of the job.

    After a failure ``torchrun --max-restarts`` starts new processes with the same store, which still has
    the addresses of the old processes, so the new ones would connect to processes that have ended
    (https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.15). ``RESTART_COUNT`` does not
    distinguish the starts, as each host counts its own. So the ranks agree on a prefix for this start:

        rank r   sets come/r = N, a random number     then waits for welcome/N, which is always new
        rank 0   reads come/r, which may be old       then sets welcome/N = P, the prefix of this start

    Rank 0 repeats this until all ranks have arrived. Answering an old N does no harm, as nobody waits
    for it.
    """

    def __init__(
        self, find_store: StoreFinder, rank: int, world_size: int, start: str = ""
    ) -> None:
        """``start`` distinguishes the starts that the same processes make one after the other."""
        self._find_store = find_store
        self._rank = rank
        self._world_size = world_size
        self._start = start
        self._number = uuid.uuid4().hex
        self._answered: dict[int, bytes] = {}
        self._store: Store | None = None

    def __call__(self) -> Store | None:
        """The store under the prefix of this start; None as long as rank 0 has not answered.

        On rank 0 each call answers the ranks that have arrived.
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
        """The store; None as long as nothing listens at the address. Returns within about a second.

        Connects again if the connection was lost, as rank 0 hosts a new store for another ``compile``.
        Raises ``RuntimeError`` if the port is taken, ``ValueError`` if no address is given.
        """
        if self._store is not None and not self._hosts:
            try:
                self._store.check(["any"])
            except dist.DistError:
                self._store = None
        if self._store is None:
            address, port = _address()
            if self._hosts:
                address = "localhost"  # MASTER_ADDR may not resolve on this host itself
            elif not _listens(address, port):
                # Checked first, as torch would wait and log every attempt.
                return None
            self._store = _TCP_STORE(
                address,
                port,
                is_master=self._hosts,
                timeout=self._timeout,
                wait_for_workers=False,
                multi_tenant=True,  # the program may create another store in this process
            )
        return self._store


def is_torchrun_store() -> bool:
    """Whether an agent of ``torchrun`` hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_hosted_here(store: Store | None, rank: int) -> bool:
    """Whether ``store`` ends with this process. If no agent hosts it, rank 0 does."""
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
    """Wait until all ranks have found the store; returns it.

    ``raise_if_told`` raises if another rank has reported a failure in the store; ``find_lost`` returns
    the ranks that have closed their connections to this one, or raises by itself.

    Warns after ``warn_seconds`` which ranks are missing, and again each time the wait has doubled.
    Raises ``PeerError`` after ``limit``, or if a rank is lost.
    """
    start = time.monotonic()
    look_seconds = _LOST_SECONDS
    others = [other for other in range(world_size) if other != rank]
    last_found: float | None = None  # when the store was found last; None if it has not been found
    while True:
        seconds = time.monotonic() - start
        missing = [0]  # without a store, rank 0 is the one to look at
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
                f"{name_ranks(missing)}, of {world_size}{_at()}; it keeps waiting, "
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
