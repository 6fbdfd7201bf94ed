"""The process groups of a job: its mesh of replicas x devices, and those of tied weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from placer._torch import abort_group, default_timeout
from placer.executor.distributed.job.assignment import RankAssignment
from placer.executor.distributed.job.ownership import Ownership
from placer.plan.types import Plan

_T = TypeVar("_T")
_NEVER_SENT = 2**31 - 1  # the tag of a message that nobody sends
_OWN_DOING = "timeout caused pair closure"  # gloo's words when it was this rank that closed them


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Whom a rank talks to.

    ``dp`` are the ranks with the same stages, ``pp`` those of the same replica, ``tied`` those of all
    replicas that hold a tensor, per set of devices with one in common.
    """

    dp: dist.ProcessGroup
    pp: dist.ProcessGroup
    world: dist.ProcessGroup
    tied: Mapping[tuple[int, ...], dist.ProcessGroup]

    def of_holders(self, devices: tuple[int, ...]) -> dist.ProcessGroup:
        """The ranks of all replicas that hold what these ``devices`` hold, this rank's among them."""
        return self.dp if len(devices) == 1 else self.tied[devices]

    def each(self) -> list[dist.ProcessGroup]:
        """All of them, once."""
        return list(dict.fromkeys((self.world, self.pp, self.dp, *self.tied.values())))


def make_mesh(plan: Plan, assignment: RankAssignment, device: torch.device) -> DeviceMesh:
    """The mesh replicas x devices; a collective call."""
    ranks = torch.arange(plan.replicas * assignment.num_devices).view(
        plan.replicas, assignment.num_devices
    )
    columns = [_make_group(column, device) for column in ranks.T.tolist()]
    rows = [_make_group(row, device) for row in ranks.tolist()]
    own = [columns[assignment.device_index], rows[assignment.replica_index]]
    return DeviceMesh.from_group(own, device.type, ranks, mesh_dim_names=("dp", "pp"))


def make_groups(mesh: DeviceMesh, ownership: Ownership, device: torch.device) -> Groups:
    """The groups of ``mesh``, and those that go across it; a collective call.

    A row or a column of the mesh that is all of it is the world too: fewer groups, fewer threads.
    """
    replicas, num_devices = mesh.shape
    dp, pp = mesh.get_group("dp"), mesh.get_group("pp")
    if num_devices == 1:
        world = dp
    elif replicas == 1:
        world = pp
    else:
        world = _make_group(range(replicas * num_devices), device)
    shared = sorted({holders for holders in ownership.holders.values() if len(holders) > 1})
    tied = {
        holders: _make_group(
            [r * num_devices + d for r in range(replicas) for d in holders], device
        )
        for holders in shared
    }
    return Groups(dp=dp, pp=pp, world=world, tied=tied)


def find_lost(group: dist.ProcessGroup) -> list[int]:
    """The ranks of ``group`` whose connections to this one they closed, as when they ended (gloo only)."""
    return _await_in_vain(group)[1]


def close_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Break the connections of ``groups``, so that ranks that wait for this one are woken up.

    Gloo has no abort (github.com/pytorch/pytorch/issues/130345), and by itself closes connections with
    the last reference to a group, which may be in the frames of a traceback that the program keeps. But
    a receive that times out closes all of them (gloo, transport/tcp/unbound_buffer.cc).
    """
    for group in groups:
        for never_comes in _await_in_vain(group)[0]:
            with suppress(RuntimeError):  # as it is meant to
                never_comes.wait(timedelta(milliseconds=1))
        abort_group(group)


def wait_of(work: dist.Work | None) -> Callable[[], object]:
    """What waits for ``work``, a message of a group that this rank is in."""
    assert work is not None  # it is for ranks that are not in the group
    return work.wait


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Every rank's ``value``, pickled, in order of rank; of the default group without ``group``."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _await_in_vain(group: dist.ProcessGroup) -> tuple[list[dist.Work], list[int]]:
    """Receives of what nobody sends, from each rank of ``group``, and the ranks that have closed theirs.

    None where the group has no gloo.
    """
    works, refused = [], []
    if "cpu:gloo" in dist.get_backend_config(group):
        for rank in dist.get_process_group_ranks(group):
            if rank == dist.get_rank():
                continue
            try:
                work = dist.irecv(torch.empty(1, device="cpu"), rank, group, tag=_NEVER_SENT)
            except RuntimeError as error:
                if _OWN_DOING not in str(error):
                    refused.append(rank)
            else:
                assert work is not None  # this rank is in the group
                works.append(work)
    return works, refused


def _make_group(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """A group of ``ranks`` that waits as long as the default group does; a collective call.

    Left to itself torch gives every new group half an hour, whatever the program chose.
    """
    group: Any = dist.new_group(list(ranks), timeout=default_timeout(device))
    return group  # type: ignore[no-any-return]
