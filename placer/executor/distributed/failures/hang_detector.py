"""Finds the rank that hangs: the only one that does not report a wait that timed out.

A timeout alone does not show which rank holds up the job, because each rank waits for its neighbours,
which wait for theirs. So a rank whose wait times out reports this in the job's store, and looks there for
reports of the others. Its connections are closed by the timeout, which wakes up the ranks that wait for
it, and they report too::

    rank 0   receives from 1: timed out             reports ┐
    rank 1   receives from 2: connection closed     reports ├ all report except 2, which hangs
    rank 2   sleeps in its data loader                      │
    rank 3   receives from 2: timed out             reports ┘
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from placer.executor.distributed.job.call_check import name_ranks
from placer.executor.distributed.job.rendezvous import POLL_SECONDS, StoreFinder

# Other waits may end later. Their reports are awaited for this fraction of the limit:
_FRACTION_OF_LIMIT = 0.05
_MIN_SECONDS = 2.0
_LONGER = "pass a longer timeout to init_process_group before placer.compile"


class HangDetector:
    """Exchanges reports of waits that timed out; ranks without a report hang.

    A store that is gone counts as one without reports.
    """

    def __init__(
        self,
        key: str,
        rank: int,
        world_size: int,
        *,
        find_store: StoreFinder,
        limit: timedelta,
    ) -> None:
        """``key`` is the same on all ranks; ``limit`` is how long they wait for each other."""
        self._key = f"{key}/waited"
        self._rank = rank
        self._world_size = world_size
        self._find_store = find_store
        self.limit = limit
        with store_may_be_gone():
            self._set(f"process/{self._rank}", f"process {os.getpid()} on {socket.gethostname()}")

    def report_timeout(self, method: str = "") -> None:
        """Report that a wait of this rank timed out, or that it lost a rank whose wait did.

        ``method`` is the call that not all ranks have made, if this rank waited for it.
        """
        with store_may_be_gone():
            self._set(f"rank/{self._rank}", method)
            self._set("called", "")

    def any_timeout(self) -> bool:
        """Whether any rank has reported a timeout."""
        with store_may_be_gone():
            return self._has("called")
        return False

    def wait_for_reports(self, *, stop: Callable[[], bool]) -> dict[str, str]:
        """Wait for the reports of the other ranks, until ``stop()`` is true or for a while at most.

        Returns arguments for ``PeerError`` that name the ranks without a report.
        """
        seconds = max(_MIN_SECONDS, _FRACTION_OF_LIMIT * self.limit.total_seconds())
        end = time.monotonic() + seconds
        while (silent := self._silent()) and time.monotonic() < end and not stop():
            time.sleep(POLL_SECONDS)
        limit = f"{self.limit.total_seconds():g} s"
        if not silent:
            return {
                "where": f"rank {self._rank}",
                "problem": f"all ranks have waited for each other, one of them longer than {limit}, "
                "which is the timeout of the process group",
                "remedy": f"look for a rank that was slow, or for lost messages; {_LONGER}",
            }
        waited = name_ranks([r for r in range(self._world_size) if r not in silent])
        method = self._method()
        problem = f"has not come to {method}" if method else "does not answer"
        doing = f"before {method}, such as loading its data" if method else "in its layers"
        return {
            "where": self._name(silent),
            "problem": f"{problem}; {waited} waited longer than {limit}, the timeout of the process "
            "group",
            "remedy": f"look at what it does {doing} (py-spy dump --pid …); if it is only slow, {_LONGER}",
        }

    def _silent(self) -> list[int]:
        ranks = [rank for rank in range(self._world_size) if rank != self._rank]
        with store_may_be_gone():
            return [rank for rank in ranks if not self._has(f"rank/{rank}")]
        return ranks

    def _method(self) -> str:
        with store_may_be_gone():
            said = [self._get(f"rank/{rank}") for rank in range(self._world_size)]
            return next(filter(None, said), "")
        return ""

    def _name(self, ranks: Sequence[int]) -> str:
        with store_may_be_gone():
            found = [self._get(f"process/{rank}") for rank in ranks]
            if all(found):
                return f"{name_ranks(ranks)} ({', '.join(found)})"
        return name_ranks(ranks)

    def _set(self, name: str, value: str) -> None:
        if (store := self._find_store()) is not None:
            store.set(f"{self._key}/{name}", value)

    def _has(self, name: str) -> bool:
        store = self._find_store()
        return store is not None and store.check([f"{self._key}/{name}"])

    def _get(self, name: str) -> str:
        """The value of ``name``, "" if it is not set."""
        if not self._has(name):
            return ""
        store: Any = self._find_store()
        value: bytes = store.get(f"{self._key}/{name}")
        return value.decode()


def store_may_be_gone() -> suppress:
    """Suppress the exceptions of a job's store, or default process group, that no longer exists."""
    return suppress(RuntimeError, ValueError)
