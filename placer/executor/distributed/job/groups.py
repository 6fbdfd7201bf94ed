"""The process groups of a job: the mesh of replicas x devices, and groups for tied weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from placer._torch import abort_group, default_timeout
from placer.executor.distributed.job.ownership import Ownership
from placer.grid import AXES, Axis, Grid
from placer.state_layout import sharing_replicas

_T = TypeVar("_T")
_UNUSED_TAG = 2**31 - 1  # the tag of a message that nobody sends
CLOSED_BY_TIMEOUT = "timeout caused pair closure"  # gloo's error text for a timeout of this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups in which a rank communicates.

    ``dp`` has the ranks with the same stages in all replicas and shards, ``columns`` those of them with the
    same shard, ``pp`` the ranks of the same replica and shard, ``sp`` the shards of a stage (None if there is
    one), ``row`` the ranks of the same replica, and ``world`` all ranks. ``tied`` has, for each set of
    devices that share a tensor, the group of these devices in all replicas and shards. ``sharing`` has, for
    a rank's own device and each such set, the ranks between which training state is divided. ``across`` has
    those with the same pieces of it, None if there are no others.
    """

    dp: dist.ProcessGroup
    columns: dist.ProcessGroup
    pp: dist.ProcessGroup
    sp: dist.ProcessGroup | None
    row: dist.ProcessGroup
    world: dist.ProcessGroup
    tied: Mapping[tuple[int, ...], dist.ProcessGroup]
    sharing: Mapping[tuple[int, ...], dist.ProcessGroup]
    across: dist.ProcessGroup | None

    def of_holders(self, devices: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of ``devices`` in all replicas, which must include this rank's device."""
        return self.dp if len(devices) == 1 else self.tied[devices]

    def each(self) -> list[dist.ProcessGroup]:
        """All groups, each once."""
        found = [self.world, self.pp, self.dp, self.columns, self.row, self.sp]
        found += [*self.tied.values(), *self.sharing.values(), self.across]
        return list(dict.fromkeys(group for group in found if group is not None))


def make_groups(
    grid: Grid, ownership: Ownership, device: torch.device, *, shard_over: int
) -> Groups:
    """The groups of this rank; a collective call. Those of the same ranks are one, which saves threads.

    Training state is divided between ``shard_over`` replicas.
    """
    rank, made = dist.get_rank(), dict[tuple[int, ...], dist.ProcessGroup]()

    def own_of(groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        made.update((ranks, _make_group(ranks, device)) for ranks in groups if ranks not in made)
        return next(made[ranks] for ranks in groups if rank in ranks)

    def along(*axes: Axis, replicas: int | None = None) -> dist.ProcessGroup:
        return own_of(grid.groups(*axes, replicas=replicas))

    shared = sorted({holders for holders in ownership.holders.values() if len(holders) > 1})
    dp, own = along("dp", "sp"), (grid.coordinates(rank).pp,)
    # Of their own, because their messages come at other times.
    tied = {holders: _make_group(grid.ranks_of(holders), device) for holders in shared}
    sharing = {own: dp, **tied}
    across = None
    if shard_over < grid.replicas:
        across = own_of(
            [ranks[n::shard_over] for ranks in grid.groups("dp") for n in range(shard_over)]
        )
        sharing = {own: along("dp", "sp", replicas=shard_over)}
        for holders in shared:
            for first in range(0, grid.replicas, shard_over):
                replicas = sharing_replicas(first, shard_over)
                group = _make_group(grid.ranks_of(holders, replicas), device)
                if grid.coordinates(rank).dp in replicas:
                    sharing[holders] = group
    return Groups(
        columns=along("dp"),
        pp=along("pp"),
        sp=along("sp") if grid.shards > 1 else None,
        dp=dp,
        row=along("pp", "sp"),
        world=along(*AXES),
        tied=tied,
        sharing=sharing,
        across=across,
    )


def make_mesh(groups: Groups, grid: Grid, device: torch.device) -> DeviceMesh:
    """The mesh of replicas x devices, or of replicas x devices x shards."""
    own = [group for group in (groups.columns, groups.pp, groups.sp) if group is not None]
    shape = grid.replicas, grid.devices, grid.shards
    at = itertools.product(*map(range, shape))
    ranks = torch.tensor([grid.rank(dp=dp, pp=pp, sp=sp) for dp, pp, sp in at])
    names = AXES[: len(own)]
    return DeviceMesh.from_group(
        own, device.type, ranks.view(shape[: len(own)]), mesh_dim_names=names
    )


def connect(groups: Groups, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
    """Use each of ``groups`` once, and ``pairs`` of ranks of ``pp`` for a message; a collective call.

    NCCL connects ranks when they first communicate, which waits for all of them. In a step that would be
    too late: with tied weights, one rank would wait in its backward for another, which waits for the
    gradient that comes out of it.
    """
    for group in groups.each():
        if dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    rank = dist.get_rank(groups.pp)
    for first, second in sorted(pairs):
        if rank == first:
            dist.send(torch.zeros(1, device=device), group=groups.pp, group_dst=second)
        elif rank == second:
            dist.recv(torch.zeros(1, device=device), group=groups.pp, group_src=first)


def find_lost(group: dist.ProcessGroup) -> list[int]:
    """The ranks of ``group`` that have closed their connection to this one, perhaps by ending (gloo only)."""
    return _probe_connections(group)[1]


def close_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close the connections of ``groups``, which wakes up ranks that wait for this one.

    Gloo has no abort (github.com/pytorch/pytorch/issues/130345). It closes connections only when the last
    reference to a group is gone, and a traceback that the program keeps may have one. But a receive that
    times out closes all connections of its group (gloo, transport/tcp/unbound_buffer.cc).
    """
    for group in groups:
        for never_comes in _probe_connections(group)[0]:
            with suppress(RuntimeError):  # the timeout that closes the connections
                never_comes.wait(timedelta(milliseconds=1))
        abort_group(group)


def wait_function(work: dist.Work | None) -> Callable[[], object]:
    """The function that waits for ``work``, which is not None as this rank is in the group."""
    assert work is not None
    return work.wait


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Every rank's ``value``, in order of rank, by pickling; over the default group if none is given."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _probe_connections(group: dist.ProcessGroup) -> tuple[list[dist.Work], list[int]]:
    """Start a receive of a message that nobody sends from each other rank of ``group``.

    Returns these receives, and the ranks whose connection turned out to be closed. Both are empty if the
    group does not use gloo.
    """
    works, refused = [], []
    if "cpu:gloo" in dist.get_backend_config(group):
        for rank in dist.get_process_group_ranks(group):
            if rank == dist.get_rank():
                continue
            try:
                work = dist.irecv(torch.empty(1, device="cpu"), rank, group, tag=_UNUSED_TAG)
            except RuntimeError as error:
                if CLOSED_BY_TIMEOUT not in str(error):
                    refused.append(rank)
            else:
                assert work is not None  # this rank is in the group
                works.append(work)
    return works, refused


def _make_group(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A group of ``ranks`` with the timeout of the default group; a collective call.

    Without an explicit timeout torch gives a new group half an hour, whatever the default group has.
    """
    group: Any = dist.new_group(list(ranks), timeout=default_timeout(device))
    return group  # type: ignore[no-any-return]


def sendable(tensor: Tensor) -> Tensor:
    """``tensor`` as communication needs it: detached, contiguous, and without a pending conj or neg."""
    own = tensor.detach() if tensor.requires_grad else tensor
    if own.is_conj() or own.is_neg():
        own = own.resolve_conj().resolve_neg()
    return own.contiguous()
