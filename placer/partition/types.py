"""What a partitioner is given about devices, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from placer.catalogue import DeviceKind
from placer.plan.types import Boundary, Optimality, StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlot:
    """A device that a stage may use; bytes. ``budget`` None: no limit was given."""

    name: str
    kind: DeviceKind
    budget: int | None
    reserve: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """What the partition is to serve: the parts of the spec that decide what a stage costs."""

    objective: str = "throughput"
    schedule: str = "GPipe"
    microbatches: int = 1  # that there are rows for
    last_share: float = 1.0  # rows of the last one, as a share of the others'
    optimizer: str | Mapping[str, int] = "adam"
    training: bool = True
    processes: bool = False  # one per device: values pass through the stages between


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in chain order; ``fits`` when every device holds all its stages under its budget.

    The stages have the devices of the first replica alone.
    """

    stages: tuple[StagePlan, ...]
    slots: tuple[DeviceSlot, ...]  # the device of each stage
    peaks: Mapping[str, int]  # device -> predicted peak bytes of all its stages
    replica_peaks: Mapping[str, int]  # the same of the devices in its place in replicas 1, 2, …
    fits: bool
    seconds: float  # of a step
    optimizer_seconds: float  # of these, the optimizer's
    optimality: Optimality
    boundaries: tuple[Boundary, ...]

    @property
    def placed(self) -> list[tuple[DeviceSlot, tuple[str, ...]]]:
        """Per stage its device and its nodes."""
        return [(slot, s.nodes) for slot, s in zip(self.slots, self.stages, strict=True)]
