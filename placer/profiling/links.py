"""Measures the links between the devices of this node, and between nodes, by the collectives of torch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from placer.machine.machine import LinkSpec

_SMALL = 2**20  # bytes
_LARGE = {"cuda": 2**28, "cpu": 2**24}
_REPEATS = {"cuda": 20, "cpu": 7}  # of which the least counts
_WAIT = timedelta(minutes=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The links that were found; ``network`` is None on one node."""

    nodes: int
    devices_per_node: int
    inside: LinkSpec
    network: LinkSpec | None


_LINKS = TypeAdapter(Measured)


def measure_links(device_type: str, devices: int) -> Measured | None:
    """The links between ``devices`` devices of this node, with a process for each, which are started here.

    In a job of torchrun its processes are used, over all nodes; only rank 0 gets the result, the others None.
    """
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=_WAIT)
        try:
            found = _measure(device_type, int(os.environ["LOCAL_WORLD_SIZE"]))
        finally:
            dist.destroy_process_group()
        return found if int(os.environ["RANK"]) == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, args=(device_type, devices, folder), nprocs=devices)
        return _LINKS.validate_json((Path(folder) / "found.json").read_text(encoding="utf-8"))


def _process(rank: int, device_type: str, devices: int, folder: str) -> None:
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=devices,
        timeout=_WAIT,
    )
    os.environ["LOCAL_RANK"] = str(rank)
    found = _measure(device_type, devices)
    if rank == 0:
        (Path(folder) / "found.json").write_bytes(_LINKS.dump_json(found))
    dist.destroy_process_group()


def _measure(device_type: str, per_node: int) -> Measured:
    """Both levels of links; every rank of the job calls this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = torch.device(device_type)
    if device_type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    inside = [list(range(first, first + per_node)) for first in range(0, world, per_node)]
    across = [list(range(first, world, per_node)) for first in range(per_node)]
    found = _links(place, _group_of(rank, inside), inside[rank // per_node])
    network = None
    if world > per_node:
        network = _links(place, _group_of(rank, across), across[rank % per_node])
    return Measured(
        nodes=world // per_node, devices_per_node=per_node, inside=found, network=network
    )


def _group_of(rank: int, groups: list[list[int]]) -> dist.ProcessGroup:
    """The group of ``rank``; every rank makes all of them, in the same order."""
    made = [(dist.new_group(ranks), ranks) for ranks in groups]
    found = next(group for group, ranks in made if rank in ranks)
    assert isinstance(found, dist.ProcessGroup)
    return found


def _links(place: torch.device, group: dist.ProcessGroup, ranks: list[int]) -> LinkSpec:
    """The link between ``ranks``, by a line through the seconds of two sizes."""
    if len(ranks) == 1:
        return LinkSpec(send=1e12)  # there is nobody to send to
    share = (len(ranks) - 1) / len(ranks)
    sent = partial(_send, group=group, ranks=ranks)
    reduced = partial(dist.all_reduce, group=group)
    gathered = partial(_gather, group=group, count=len(ranks))
    latency, send = _line(place, group, sent, 1.0)
    slowest, bus = _line(place, group, reduced, 2 * share)
    _, gather = _line(place, group, gathered, share)
    rates = (float(f"{rate:.3g}") for rate in (send, min(bus, gather)))
    return LinkSpec(**dict(zip(("send", "bus"), rates, strict=True)), latency=max(latency, slowest))


def _line(
    place: torch.device, group: dist.ProcessGroup, act: Callable[[Tensor], object], moved: float
) -> tuple[float, float]:
    """Seconds of latency, and bytes per second, where ``moved`` times the bytes pass every rank."""
    small, large = _SMALL, _LARGE[place.type]
    few, many = (_least(place, group, act, nbytes) for nbytes in (small, large))
    rate = moved * (large - small) / max(many - few, 1e-9)
    return max(0.0, few - moved * small / rate), rate


def _least(
    place: torch.device, group: dist.ProcessGroup, act: Callable[[Tensor], object], nbytes: int
) -> float:
    """The least seconds of ``act`` on so many bytes, over some repeats; the slowest rank counts."""
    x = torch.ones(nbytes // 4, device=place)
    least = float("inf")
    for _ in range(_REPEATS[place.type]):
        dist.barrier(group)
        start = time.perf_counter()
        act(x)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        took = torch.tensor([time.perf_counter() - start], device=place)
        dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
        least = min(least, float(took))
    return least


def _send(x: Tensor, *, group: dist.ProcessGroup, ranks: list[int]) -> None:
    """From the first of ``ranks`` to the last."""
    if dist.get_rank() == ranks[0]:
        dist.send(x, ranks[-1], group=group)
    elif dist.get_rank() == ranks[-1]:
        dist.recv(x, ranks[0], group=group)


def _gather(x: Tensor, *, group: dist.ProcessGroup, count: int) -> None:
    """Every rank gathers ``x`` from pieces of all."""
    piece = x[: len(x) // count]
    dist.all_gather([torch.empty_like(piece) for _ in range(count)], piece, group=group)
