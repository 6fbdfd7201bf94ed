"""Brings the ranks of a job together: the default process group, which the program need not make."""

from __future__ import annotations

import atexit
import os
import time
import uuid
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store

from placer.errors import PeerError, PlacerError
from placer.executor.distributed.job.assignment import Job

POLL_SECONDS = 0.02  # between two reads of the store
_WARN_SECONDS = 30.0  # after which a rank says for whom it waits

_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]


def join_job(job: Job) -> None:
    """Initialize the default process group if the program has not; waits for all ranks of the job.

    The backend is NCCL for CUDA and gloo for the CPU. Raises ``PeerError`` if ranks have not come in half
    an hour, ``PlacerError`` if there is no way to them.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store = start_store(_launchers_store(job), job, limit=default_pg_timeout)
        dist.init_process_group(
            backend, store=PrefixStore("group", store), rank=job.rank, world_size=job.world_size
        )
    except (RuntimeError, ValueError) as error:
        raise _not_joined(error) from error
    # Its threads let go of the last messages' tensors, for which they need the interpreter: one that is
    # late would abort the process at its end (https://github.com/pytorch/pytorch/issues/190489, torch 2.15).
    atexit.register(time.sleep, 0.1)


def is_torchrun_store() -> bool:
    """Whether an agent of ``torchrun`` hosts the store, which so outlives all ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def start_store(
    store: Store, job: Job, *, limit: timedelta, warn_seconds: float = _WARN_SECONDS
) -> Store:
    """``store`` under a prefix that is new for this start of the job; waits for all ranks.

    After a failure ``torchrun --max-restarts`` starts new processes with the same store, which still has
    the addresses of the old processes (https://github.com/pytorch/pytorch/issues/135712, seen with torch
    2.15). ``RESTART_COUNT`` does not distinguish the starts, as each host counts its own. So the ranks agree
    on a prefix for this start:

        rank r   sets come/r = N, a random number     then waits for welcome/N, which is always new
        rank 0   reads come/r, which may be old       then sets welcome/N = P, the prefix of this start

    Rank 0 repeats this until all ranks are here, under the prefix. Answering an old N does no harm, as
    nobody waits for it. Warns after ``warn_seconds`` which ranks are missing; raises ``PeerError`` after
    ``limit``.
    """
    store, number = PrefixStore("placer/start", store), uuid.uuid4().hex
    others = [rank for rank in range(job.world_size) if rank != job.rank]
    begin = time.monotonic()
    warned = False
    if job.rank > 0:
        store.set(f"come/{job.rank}", number)
    while True:
        prefix = (
            _answer(store, others, number) if job.rank == 0 else _read(store, f"welcome/{number}")
        )
        missing = [0]
        if prefix:
            started = PrefixStore(prefix, store)
            started.set(f"here/{job.rank}", "")
            missing = [rank for rank in others if not started.check([f"here/{rank}"])]
            if not missing:
                return started
        seconds = time.monotonic() - begin
        if seconds > limit.total_seconds():
            raise PeerError(
                f"rank {job.rank}",
                f"waited {limit.total_seconds():g} s for {name_ranks(missing)}, of {job.world_size}",
                f"look at the output of {name_ranks(missing)}, and whether the hosts reach each other",
            )
        if seconds > warn_seconds and not warned:
            warned = True
            warnings.warn(
                f"rank {job.rank} has waited {warn_seconds:g} s in placer.compile for "
                f"{name_ranks(missing)}, of {job.world_size}; it keeps waiting, "
                f"{limit.total_seconds():g} s in all",
                RuntimeWarning,
                stacklevel=2,
            )
        time.sleep(POLL_SECONDS)


def _answer(store: Store, others: Sequence[int], prefix: str) -> str:
    """Tell the ``prefix`` to each of the ``others`` that has asked; returns it."""
    for rank in others:
        if number := _read(store, f"come/{rank}"):
            store.set(f"welcome/{number}", prefix)
    return prefix


def _read(store: Store, key: str) -> str:
    """The value of ``key``, "" if it is not set."""
    return store.get(key).decode() if store.check([key]) else ""


def _launchers_store(job: Job) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 hosts unless ``torchrun``'s agent does."""
    hosts = job.rank == 0 and not is_torchrun_store()
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if None in address:
        raise ValueError("MASTER_ADDR and MASTER_PORT are not both set")
    store: Store = _TCP_STORE(
        "localhost" if hosts else address[0],  # which may not resolve on this host itself
        int(str(address[1])),
        is_master=hosts,
        timeout=default_pg_timeout,
        wait_for_workers=False,
        multi_tenant=True,  # the program may create another store in this process
    )
    return store


def _not_joined(error: Exception) -> PlacerError:
    """The error to raise for an exception of ``init_process_group`` or of the store."""
    env = os.environ
    where = f"rank {env.get('RANK', '?')}"
    reason = f"({str(error).splitlines()[0]})"
    if "EADDRINUSE" in str(error):
        return PlacerError(
            where,
            f"port {env['MASTER_PORT']} is taken already, by another job or program {reason}",
            "choose another MASTER_PORT, or use torchrun --standalone, which finds a free port",
        )
    address = f"{env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
    return PlacerError(
        where,
        f"did not find the other processes of the job at {address} {reason}",
        "start as many processes as WORLD_SIZE says, and check that they can reach that address",
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """The ranks in words, for messages.

    >>> name_ranks([1]), name_ranks([1, 3])
    ('rank 1', 'ranks 1, 3')
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
