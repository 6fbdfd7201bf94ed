"""Finds the job of this process, and the replica, stages and device that its rank gets of a plan."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from placer.errors import DeviceError, PlacerError
from placer.executor.places.device_map import SimulatedDeviceWarning, device_count, torch_type
from placer.grid import Grid
from placer.plan.types import Plan
from placer.quantities import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """This process in its job, as the launcher says; known without communication."""

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """What one rank runs of a plan. ``device_of[stage]`` is the index of a stage's device in a replica."""

    rank: int  # in the job
    grid: Grid
    device_of: tuple[int, ...]

    @cached_property
    def replica_index(self) -> int:
        """The replica that the rank belongs to."""
        return self.grid.coordinates(self.rank).dp

    @cached_property
    def device_index(self) -> int:
        """The device of the replica that the rank is."""
        return self.grid.coordinates(self.rank).pp

    @cached_property
    def shard_index(self) -> int:
        """The shard of its stages that the rank has."""
        return self.grid.coordinates(self.rank).sp

    @cached_property
    def replicas(self) -> list[tuple[int, ...]]:
        """The ranks of each replica, in the order of its devices, and of their shards."""
        return self.grid.groups("pp", "sp")

    def positions(self, device: int) -> list[int]:
        """Where the ranks of a device, with all its shards, are among those of a replica."""
        first = self.replicas[0]
        return [first.index(self.grid.rank(pp=device, sp=s)) for s in range(self.grid.shards)]

    @property
    def num_devices(self) -> int:
        """The number of devices of a replica."""
        return self.grid.devices

    @cached_property
    def stage_indices(self) -> tuple[int, ...]:
        """The stages that this rank runs."""
        return tuple(s for s, device in enumerate(self.device_of) if device == self.device_index)


def find_job() -> Job | None:
    """The job that this process is part of; None if it runs alone.

    There is a job if the default process group exists, if ``torchrun`` started the process, or if another
    launcher (``mpirun``, ``srun``) has set the environment variables that ``torch.distributed`` reads, for
    more than one process. On machines with several devices it must also set LOCAL_RANK.
    """
    if not dist.is_available():
        return None
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif dist.is_torchelastic_launched() or _is_launched():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        return None
    return Job(rank=rank, world_size=world_size, local_rank=int(os.environ.get("LOCAL_RANK", rank)))


def _is_launched() -> bool:
    wanted = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return wanted <= os.environ.keys() and os.environ["WORLD_SIZE"] != "1"


def assign_rank(plan: Plan, job: Job) -> RankAssignment:
    """The assignment of this rank. Raises ``PlacerError`` if the job has not one process per device."""
    grid = plan.grid
    if job.world_size != grid.size:
        raise PlacerError(
            "world size",
            f"the job has {job.world_size} processes, the plan needs {grid.size}: "
            f"{format_count(grid.replicas, 'replica')} x {format_count(plan.num_devices, 'device')}, one "
            "process each",
            f"torchrun with {grid.size} processes in all (--nproc-per-node, --nnodes), or change "
            "devices and replicas of the spec",
        )
    return RankAssignment(rank=job.rank, grid=grid, device_of=plan.device_of)


def choose_device(plan: Plan, job: Job, run_on: str | None) -> torch.device:
    """The torch device of this process: the plan's type of device, with the local rank as its index.

    ``run_on`` gives another type. If the machine has no device of that type, the CPU stands for it, with
    a ``SimulatedDeviceWarning`` unless ``run_on`` was given. Raises ``DeviceError`` if there are fewer
    devices than local ranks, and if ``run_on`` is not a device.
    """
    kind = torch_type(run_on or plan.stages[0].devices[0])
    if kind == "cpu":
        return torch.device("cpu")
    count = device_count(kind)
    if count == 0:
        if run_on is None:
            warnings.warn(
                f"this machine has no {kind} device, so rank {job.rank} runs on the CPU. "
                "Pass run_on='cpu' if this is intended.",
                SimulatedDeviceWarning,
                stacklevel=4,
            )
        return torch.device("cpu")
    if count > 1 and job.local_rank >= count:
        raise DeviceError(
            f"local rank {job.local_rank}",
            f"this machine has only {count} {kind} devices",
            f"start at most {count} processes on it (--nproc-per-node); a launcher other than torchrun "
            "must set LOCAL_RANK, the index of a process on its machine",
        )
    return torch.device(kind, job.local_rank if count > 1 else 0)
