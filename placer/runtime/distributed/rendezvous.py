"""A key-value store without the keys of a job that was there before.

``torchrun`` starts a job anew after a failure (``--max-restarts``) and hands the new processes the
store of the old ones, with the old addresses in it: they connect to processes that have ended
(https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.15). ``RESTART_COUNT`` does not
tell the jobs apart, as each host counts its own. So the ranks agree on a prefix of this start:

    rank r   come/r = N, a number of its own    waits for welcome/N, which nobody set before
    rank 0   reads come/r, old or new           welcome/N = P, the prefix of this start
    rank r   here/P/r                           rank 0 goes on when all are here

Rank 0 answers what it reads, and reads again until the rank itself has answered: an old N does no
harm, as nobody waits for it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from placer.errors import PlacerError

_PAUSE_SECONDS = 0.02


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """``store`` under a prefix that all ranks of this start, and no others, have.

    Waits for all ranks. Raises ``PlacerError`` on rank 0, naming those that did not come in time.
    """
    store = PrefixStore("placer/rendezvous", store)
    if rank:
        number = uuid.uuid4().hex
        store.set(f"come/{rank}", number)
        store.wait([f"welcome/{number}"], timeout)
        prefix = store.get(f"welcome/{number}").decode()
        store.set(f"here/{prefix}/{rank}", "")
    else:
        prefix = uuid.uuid4().hex
        _welcome(store, prefix, world_size, timeout)
    return PrefixStore(prefix, store)


def _welcome(store: Store, prefix: str, world_size: int, timeout: timedelta) -> None:
    end = time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"come/{rank}"]):
                store.set(f"welcome/{store.get(f'come/{rank}').decode()}", prefix)
        missing = [rank for rank in missing if not store.check([f"here/{prefix}/{rank}"])]
        if missing and time.monotonic() > end:
            names = ", ".join(map(str, missing))
            raise PlacerError(
                "rank 0",
                f"waited {timeout.total_seconds():g} s for rank {names}, of {world_size}",
                "look at the output of those ranks, and whether their host reaches this one",
            )
        time.sleep(_PAUSE_SECONDS)
