"""Devices and options that a partition is chosen for, and the partition itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placer.catalogue import DeviceKind
from placer.plan.types import Boundary, Optimality, StagePlan, Transfer
from placer.spec.fields import AllocatorName


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlot:
    """A device that a stage may use; bytes. ``budget`` None: no limit was given.

    ``reserve`` is what tensors may not have of the budget: the ``context`` and what is left free.
    ``allocator`` is that of torch on a CUDA device, None on others.
    """

    name: str
    kind: DeviceKind
    budget: int | None
    reserve: int
    context: int = 0
    allocator: AllocatorName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """The parts of a spec on which the cost of a stage depends."""

    objective: str = "throughput"
    schedule: str = "GPipe"
    microbatches: int = 1  # of those that the spec asks for, the ones that get rows
    last_share: float = 1.0  # rows of the last micro-batch as a share of another's
    optimizer: str | Mapping[str, int] = "adam"
    training: bool = True
    processes: bool = False  # one process per device
    offload_overlap: bool = False  # copies to the host and back run beside a GPU's kernels
    host_budget: int | None = None  # bytes that the offloaded activations of a replica may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in order, on the devices of the first replica.

    ``fits``: the stages of every device are within its budget. Peaks are estimates, in bytes.
    """

    stages: tuple[StagePlan, ...]
    slots: tuple[DeviceSlot, ...]  # the device of each stage
    peaks: Mapping[str, int]  # device -> peak of all its stages
    # The same for the devices that have its stages in other replicas.
    replica_peaks: Mapping[str, int]
    fits: bool
    transfers: tuple[Transfer, ...]
    seconds: float  # a step, estimated
    optimizer_seconds: float  # of these, the optimizer's
    optimality: Optimality
    boundaries: tuple[Boundary, ...]

    @property
    def placed(self) -> list[tuple[DeviceSlot, tuple[str, ...]]]:
        """The device and the nodes of every stage."""
        return [(slot, s.nodes) for slot, s in zip(self.slots, self.stages, strict=True)]
