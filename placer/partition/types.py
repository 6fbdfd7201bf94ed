"""The devices and options for which a partition is chosen, and the partition itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from placer.grid import Grid, NodeLayout
from placer.machine.catalogue import DeviceKind
from placer.machine.links import Link, Links
from placer.plan.types import Boundary, Optimality, StagePlan, Transfer
from placer.schedule import splits_backward
from placer.spec.fields import AllocatorName, ScheduleName
from placer.state_layout import StateLayout

# A chain of more stages is only looked for along program order: tables of all stages take seconds to make.
MANY_STAGES = 16
_INSTANT = Links(inside=Link(send=math.inf, bus=math.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlot:
    """A device that a stage may use; sizes are in bytes. ``budget`` is None if no limit was given.

    Of the budget, the process takes ``context``, and ``reserve`` stays free. ``correction`` is what a dry
    run needed beyond the estimated peak of an earlier plan; estimates of this plan may be as far off.
    ``allocator`` is the mode of torch's CUDA allocator, None on other devices.
    """

    name: str
    kind: DeviceKind
    budget: int | None
    reserve: int
    context: int = 0
    correction: int = 0
    allocator: AllocatorName | None = None

    @property
    def withheld(self) -> int:
        """The bytes of the budget that an estimated peak may not use."""
        return self.context + self.reserve + self.correction

    @property
    def room(self) -> int | None:
        """The bytes of the budget that an estimated peak may use; negative if there are none."""
        return None if self.budget is None else self.budget - self.withheld

    def fits(self, peak: float) -> bool:
        """Whether an estimated ``peak`` is within the budget."""
        return self.room is None or peak <= self.room


def whole_backwards(schedule: ScheduleName) -> ScheduleName:
    """The schedule in place of one that splits backwards, where they run as a whole."""
    return "1F1B" if splits_backward(schedule) else schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """The parts of a spec that the cost of a stage depends on."""

    objective: str = "throughput"
    schedule: ScheduleName = "GPipe"
    microbatches: int = 1  # that get rows; may be fewer than the spec asks for
    replicas: int = 1
    shards: int = 1
    links: Links = _INSTANT
    node_layout: NodeLayout = "stages"
    last_share: float = 1.0  # rows of the last micro-batch divided by those of any other
    optimizer: str | Mapping[str, int] = "adam"
    training: bool = True
    processes: bool = False  # one process per device
    state_layout: StateLayout = field(default_factory=StateLayout)
    offload_overlap: bool = False  # copies to and from the host overlap with a GPU's kernels
    # Bytes of host memory for the offloaded activations of a replica
    host_budget: int | None = None

    def grid(self, devices: int) -> Grid:
        """The grid of the ranks, for so many devices of a replica, shards not counted."""
        return Grid(
            replicas=self.replicas,
            devices=devices,
            shards=self.shards,
            node_layout=self.node_layout,
        )

    def with_whole_backwards(self) -> PlanningOptions:
        """The same with backwards that are not split, as where a stage recomputes.

        Both halves of a split backward would run what is recomputed again, and what the first one made
        again for weights would stay until the second (`torch.utils.checkpoint` keeps it).
        """
        return replace(self, schedule=whole_backwards(self.schedule))


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages in order, on the devices of the first replica.

    ``fits`` says whether the stages of every device are within its budget. Peaks are estimates, in bytes.
    """

    stages: tuple[StagePlan, ...]
    slots: tuple[DeviceSlot, ...]  # the device of each stage
    peaks: Mapping[str, int]  # for each device, the peak of all its stages together
    # The same for the devices that run these stages in other replicas
    replica_peaks: Mapping[str, int]
    fits: bool
    transfers: tuple[Transfer, ...]
    seconds: float  # of a step, estimated
    optimizer_seconds: float  # the part of ``seconds`` that the optimizer's step takes
    optimality: Optimality
    boundaries: tuple[Boundary, ...]

    @property
    def placed(self) -> list[tuple[DeviceSlot, tuple[str, ...]]]:
        """The device and the nodes of every stage."""
        return [(slot, s.nodes) for slot, s in zip(self.slots, self.stages, strict=True)]
