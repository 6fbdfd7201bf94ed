"""Signs of life of the ranks of a job that has no process group yet.

A rank may be killed while it plans, or its machine may fail, and no connection tells the others. So every
rank adds one to a counter in the job's store each second, in a thread of its own. A rank whose counter has
stood still for half a minute is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from placer.executor.distributed.failures.hang_detector import store_may_be_gone
from placer.executor.distributed.job.rendezvous import POLL_SECONDS, StoreFinder

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 2.0  # between two readings of the other ranks' counters
_SILENT_SECONDS = 30.0  # without a beat, after which a rank is lost


class Heartbeat:
    """Counts in the store while this rank is in a block, and finds ranks that have stopped counting."""

    def __init__(self, key: str, rank: int, world_size: int) -> None:
        """``key`` is the same on all ranks."""
        self.silent_seconds = _SILENT_SECONDS
        self._rank = rank
        self._keys = {r: f"{key}/beats/{r}" for r in range(world_size)}
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> last count, and when it was new
        self._next_look = 0.0

    @contextmanager
    def beating(self, find_store: StoreFinder, *, patience_seconds: float) -> Iterator[None]:
        """Count in the store that ``find_store`` finds, which no other thread may use, in this block.

        The block begins after the first beat, without which the others would not miss this rank. It waits
        for ``patience_seconds`` at most, as rank 0, which hosts the store, may start later.
        """
        begun, ended = threading.Event(), threading.Event()

        def beat() -> None:
            while not ended.is_set():
                with store_may_be_gone():
                    if (store := find_store()) is not None:
                        store.add(self._keys[self._rank], 1)
                        begun.set()
                ended.wait(_BEAT_SECONDS if begun.is_set() else POLL_SECONDS)

        thread = threading.Thread(target=beat, name="placer-heartbeat", daemon=True)
        thread.start()
        begun.wait(patience_seconds)
        try:
            yield
        finally:
            ended.set()
            thread.join(_BEAT_SECONDS)  # a thread that waits for a lost store is left to itself

    def silent_ranks(self, find_store: StoreFinder) -> list[int]:
        """The other ranks that have counted, but not in the last half minute.

        A rank that has never counted has not come to ``placer.compile`` yet, and is not among them.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            with store_may_be_gone():
                self._look(find_store, now)
        return [r for r, (_, since) in self._seen.items() if now - since > self.silent_seconds]

    def _look(self, find_store: StoreFinder, now: float) -> None:
        store = find_store()
        for rank, key in self._keys.items():
            if store is None or rank == self._rank or not store.check([key]):
                continue
            count = store.add(key, 0)
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
