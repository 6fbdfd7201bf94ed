"""Tells every rank of a job why one of them failed, through the job's key-value store.

A rank that fails stores its reason before it closes its connections, which wakes up the others; they look
for the reason when their communication fails. If none is there, the rank was killed, or one hangs.

A timeout alone does not show which rank hangs, because each rank waits for its neighbours, which wait for
theirs. So a rank whose communication fails says that it waited, and the one that has not said so hangs::

    rank 0   receives from 1: timed out             waited ┐
    rank 1   receives from 2: connection closed     waited ├ all have waited except 2, which hangs
    rank 2   sleeps in its data loader                     │
    rank 3   receives from 2: timed out             waited ┘
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store

from placer._torch import default_store
from placer.errors import PeerError, PlacerError
from placer.executor.distributed.job.groups import CLOSED_BY_TIMEOUT, find_lost
from placer.executor.distributed.job.join import POLL_SECONDS, is_torchrun_store, name_ranks

_LISTEN_SECONDS = 2.0  # how long to wait for another rank's reason
# How long the rank that hosts the store waits until others, which may be planning, have read its reason.
_READ_SECONDS = 30.0
_LOOK_SECONDS = 1.0  # between two looks for closed connections
_TOLD = "told"
_TIMED_OUT = "timed out"

Told = Mapping[str, str]  # the arguments of an error: where, problem, remedy


class FailureBroadcast:
    """One message from the rank that failed first to all others, in the store of the default group.

    A store that is gone, or a group that the program has destroyed, counts as one without a message.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str,
        *,
        limit: timedelta = default_pg_timeout,
        find_store: Callable[[], Store] = default_store,
    ) -> None:
        """``name`` is unique, and the same on every rank; ``limit`` is how long ranks wait for each other."""
        self.limit = limit
        self._name = name
        self._rank = rank
        self._ranks = range(world_size)
        self._find_store = find_store
        with _store_may_be_gone():
            process = f"process {os.getpid()} on {socket.gethostname()}"
            self._store.set(f"process/{rank}", process)

    @property
    def _store(self) -> Store:
        return PrefixStore(f"placer/failures/{self._name}", self._find_store())

    def tell(self, told: Told) -> dict[str, str]:
        """Store the message ``told``, unless another rank was first; returns the one that is stored."""
        first = dict(told)
        with _store_may_be_gone():
            first = json.loads(self._store.compare_set(_TOLD, "", json.dumps(first)))
            self._store.set(f"read/{self._rank}", "")
        return first

    def read(self) -> dict[str, str] | None:
        """The message of the rank that failed first, if one has."""
        told: dict[str, str] | None = None
        with _store_may_be_gone():
            if self._store.check([_TOLD]):
                told = json.loads(self._store.get(_TOLD))
                self._store.set(f"read/{self._rank}", "")
        return told

    def await_readers(self) -> None:
        """On rank 0, which may host the store, wait a while until all that live have read the message."""
        if self._rank > 0 or is_torchrun_store():
            return
        end = time.monotonic() + _READ_SECONDS
        with _store_may_be_gone():
            while time.monotonic() < end:
                unread = {r for r in self._ranks if not self._store.check([f"read/{r}"])}
                if self._store.check([_TIMED_OUT]):  # a rank that hangs will not read it
                    unread = {r for r in unread if self._store.check([f"waited/{r}"])}
                if not unread or unread <= set(_find_lost()):
                    return
                time.sleep(POLL_SECONDS)

    def explain_loss(
        self, cause: BaseException, find_lost: Callable[[], Sequence[int]]
    ) -> dict[str, str] | None:
        """The reason for ``cause``, an error of a communication; None if it is of something else.

        It is what another rank has told, otherwise what this rank knows, which it tells. ``find_lost``
        returns the ranks whose connections are closed; gloo raises plain ``RuntimeError``s, so these are
        the evidence.
        """
        timed_out = any(text in str(cause).lower() for text in ("timed out", CLOSED_BY_TIMEOUT))
        # Before other ranks close their connections too. A timeout has closed those of this rank.
        lost = [] if timed_out else list(find_lost())
        end = time.monotonic() + _LISTEN_SECONDS
        with _store_may_be_gone():
            self._store.set(f"waited/{self._rank}", "")
            if timed_out:
                self._store.set(_TIMED_OUT, "")
            while time.monotonic() < end:
                if (told := self.read()) is not None:
                    return told
                if self._store.check([_TIMED_OUT]):
                    return self.tell(self._name_silent())
                time.sleep(POLL_SECONDS)
        lost = lost or list(find_lost())
        if lost or timed_out or isinstance(cause, dist.DistError):
            return self.tell(lost_connection(self._rank, lost, cause))
        return None

    def _name_silent(self) -> dict[str, str]:
        """A message that names the ranks that do not wait; or what another rank tells meanwhile."""
        others = [rank for rank in self._ranks if rank != self._rank]
        end = time.monotonic() + max(_LISTEN_SECONDS, 0.05 * self.limit.total_seconds())
        while silent := [r for r in others if not self._store.check([f"waited/{r}"])]:
            if (told := self.read()) is not None:
                return told
            if time.monotonic() > end:
                return self._hang(silent)
            time.sleep(POLL_SECONDS)
        return {
            "where": f"rank {self._rank}",
            "problem": "all ranks have waited for each other, one of them longer than "
            f"{self.limit.total_seconds():g} s, the timeout of the process group",
            "remedy": "look for a rank that was slow, or for lost messages; pass a longer timeout to "
            "init_process_group before placer.compile",
        }

    def _hang(self, silent: Sequence[int]) -> dict[str, str]:
        self._store.set(f"waited/{self._rank}", "")
        self._store.set(_TIMED_OUT, "")
        processes = [self._store.get(f"process/{rank}").decode() for rank in silent]
        waited = name_ranks([rank for rank in self._ranks if rank not in silent])
        return {
            "where": f"{name_ranks(silent)} ({', '.join(processes)})",
            "problem": f"does not answer; {waited} waited longer than "
            f"{self.limit.total_seconds():g} s, the timeout of the process group",
            "remedy": "look at what it does (py-spy dump --pid …); if it is only slow, pass a longer "
            "timeout to init_process_group before placer.compile",
        }

    def gather(self, what: str, value: str = "") -> list[str]:
        """Every rank's ``value``, in order of rank, by the store; waits for all ranks.

        ``what`` is unique. Raises ``PeerError`` if another rank has failed, is lost, or does not come
        within the limit.
        """
        begin = looked = time.monotonic()
        keys = [f"{what}/{rank}" for rank in self._ranks]
        try:
            self._store.set(keys[self._rank], value)
            while not self._store.check(keys):
                now = time.monotonic()
                if (told := self.read()) is not None and not self._store.check(keys):
                    raise PeerError(**told)
                if now > looked + _LOOK_SECONDS:
                    looked = now
                    if lost := _find_lost():
                        raise PeerError(**self.tell(lost_connection(self._rank, lost)))
                if now > begin + self.limit.total_seconds():
                    silent = [r for r in self._ranks if not self._store.check([keys[r]])]
                    raise PeerError(**self.tell(self._hang(silent)))
                time.sleep(POLL_SECONDS)
            return [self._store.get(key).decode() for key in keys]
        except PlacerError:
            raise
        except RuntimeError as error:
            raise PeerError(**lost_connection(self._rank, (), error)) from error

    @contextmanager
    def told_to_all(self) -> Iterator[None]:
        """Tell the other ranks of an exception in the block, which is not in a step."""
        try:
            yield
        except PeerError:
            self.await_readers()
            raise
        except BaseException as error:
            where, problem, remedy = f"rank {self._rank}", f"{type(error).__name__}: {error}", ""
            if isinstance(error, PlacerError):
                where, problem, remedy = (
                    f"{where}, {error.where}",
                    error.problem,
                    f"{error.remedy}; ",
                )
            remedy += "give every rank the same model and spec"
            self.tell({"where": where, "problem": problem, "remedy": remedy})
            if isinstance(error, Exception):  # otherwise the program should end at once
                self.await_readers()
            raise

    @contextmanager
    def lost_peers(self) -> Iterator[None]:
        """Raise ``PeerError`` if a communication over the default group fails in the block."""
        try:
            yield
        except PlacerError:
            raise
        except RuntimeError as error:
            told = self.explain_loss(error, _find_lost)
            raise PeerError(**told or lost_connection(self._rank, (), error)) from error


def lost_connection(
    rank: int, lost: Sequence[int], error: BaseException | None = None
) -> dict[str, str]:
    """The message of ``rank`` that the ranks ``lost``, or others that it does not know, have ended."""
    problem = "lost the connection to another rank, which ended or does not answer"
    if lost:
        problem = f"lost the connection to {name_ranks(lost)}, which ended"
    if error is not None:
        problem += (
            f" ({(str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:200]})"
        )
    return {
        "where": f"rank {rank}",
        "problem": problem,
        "remedy": "look at that rank's own output for the first error",
    }


def _find_lost() -> list[int]:
    """The ranks that have closed their connections of the default group."""
    group = dist.group.WORLD
    return [] if group is None else find_lost(group)


def _store_may_be_gone() -> suppress:
    """Suppress the exceptions of a store, or a default process group, that no longer exists."""
    return suppress(RuntimeError, ValueError)
