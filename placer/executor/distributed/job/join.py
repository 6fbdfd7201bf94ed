"""Waits for the other ranks of the job, and initializes the default process group if needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store

from placer._torch import default_store, default_timeout
from placer.errors import PlacerError
from placer.executor.distributed.job.assignment import Job
from placer.executor.distributed.job.groups import find_lost
from placer.executor.distributed.job.rendezvous import (
    StoreFinder,
    TcpStore,
    TorchrunStore,
    is_torchrun_store,
    meet,
)


def store_for_start(job: Job, name: str) -> StoreFinder:
    """A function that finds the store in which ranks meet; ``name`` must be the same on all of them.

    It is the store of the default process group if there is one, otherwise that of the launcher.
    """
    if dist.is_initialized():
        return lambda: PrefixStore(f"placer/{name}", default_store())
    if is_torchrun_store():
        agents = TcpStore(hosts=False, timeout=default_pg_timeout)
        return TorchrunStore(agents, job.rank, job.world_size, name)
    hosted = TcpStore(hosts=job.rank == 0, timeout=default_pg_timeout)

    def find() -> Store | None:
        store = hosted()
        return None if store is None else PrefixStore(f"placer/{name}", store)

    return find


def join_job(
    device: torch.device,
    job: Job,
    find_store: StoreFinder,
    *,
    raise_if_told: Callable[[], None] = lambda: None,
    raise_if_silent: Callable[[], None] = lambda: None,
) -> None:
    """Wait for the other ranks, and initialize the default process group if the program has not.

    The backend is NCCL for CUDA and gloo for the CPU. ``raise_if_told`` is called while waiting; it
    raises if another rank has reported a failure. ``raise_if_silent`` raises if a rank gives no sign of
    life any more; it is called if there is no process group yet, whose connections would tell.
    The wait is limited by the timeout of the default process group, half an hour unless the program
    chose another. Raises ``PlacerError`` if the ranks do not find each other.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)

    def find_silent() -> Sequence[int]:
        raise_if_silent()
        return ()

    wait = partial(meet, find_store, job.rank, job.world_size, raise_if_told=raise_if_told)
    if dist.is_initialized():
        wait(limit=default_timeout(device), find_lost=_find_lost)
        return
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    try:
        find_store()
        store = wait(limit=default_pg_timeout, find_lost=find_silent)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=job.rank,
            world_size=job.world_size,
        )
    except (RuntimeError, ValueError) as error:
        raise _not_joined(error) from error


def _find_lost() -> list[int]:
    assert dist.group.WORLD is not None
    return find_lost(dist.group.WORLD)


def _not_joined(error: Exception) -> PlacerError:
    """The error to raise for an exception of ``init_process_group`` or of the store."""
    env = os.environ
    where = f"rank {env.get('RANK', '?')}"
    address = f"{env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
    reason = f"({str(error).splitlines()[0]})"
    if "EADDRINUSE" in str(error):
        return PlacerError(
            where,
            f"port {env['MASTER_PORT']} is taken already, by another job or program {reason}",
            "choose another MASTER_PORT, or use torchrun --standalone, which finds a free port",
        )
    return PlacerError(
        where,
        f"did not find the other processes of the job at {address} {reason}",
        "start as many processes as WORLD_SIZE says, and check that they can reach that address",
    )
