"""What a partitioner is given about devices, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placer.catalogue import DeviceKind
from placer.plan.types import Boundary, Optimality, StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlot:
    """A device that a stage may use; bytes. ``budget`` None: no limit was given."""

    name: str
    kind: DeviceKind
    budget: int | None
    reserve: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What the partition is to serve: the parts of the spec that decide what a stage costs."""

    objective: str = "throughput"
    schedule: str = "GPipe"
    microbatches: int = 1  # that there are rows for
    last_share: float = 1.0  # rows of the last one, as a share of the others'
    optimizer: str | Mapping[str, int] = "adam"
    training: bool = True
    half: bool = False
    processes: bool = False  # one per device: values pass through the stages between


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStage:
    """One stage: its device, its nodes in program order, and what they cost there."""

    device: DeviceSlot
    nodes: tuple[str, ...]
    memory: StageMemory
    replica_peak: int
    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in chain order; ``fits`` when every device holds all its stages under its budget."""

    stages: tuple[PartitionStage, ...]
    peaks: Mapping[str, int]  # device -> predicted peak bytes of all its stages
    replica_peaks: Mapping[str, int]  # the same of the devices in its place in replicas 1, 2, …
    fits: bool
    seconds: float  # of a step
    optimality: Optimality
    boundaries: tuple[Boundary, ...]
