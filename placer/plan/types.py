"""A plan: the fully resolved placement, and what it is expected to cost.

These dataclasses are the JSON of a plan file, too: pydantic reads and writes them by their
annotations (`placer.plan.store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from placer.regions.types import Region
from placer.schedule import ranks_of
from placer.spec.fields import MOST, AllocatorName

Bytes = Annotated[int, Field(ge=0, le=2**63 - 1)]  # torch counts them in an int64
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Predicted bytes of one stage on one device over a training step, by kind.

    ``saved`` counts every micro-batch in flight at its peak; ``boundary`` what was received and is
    not saved; ``transient`` the rest that is live at the peak's moment. ``peak`` is the largest sum
    over time, without the reserve: at most the sum of the kinds.
    """

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: Bytes
    saved: Bytes
    boundary: Bytes
    transient: Bytes
    peak: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: its nodes, its device in every replica, and what it costs there.

    ``memory`` is in bytes, that of the first replica; times are in seconds, of one micro-batch.
    """

    index: Index
    devices: tuple[str, ...]  # one per replica
    layers: tuple[str, ...]  # modules wholly or partly on this stage, in program order
    nodes: tuple[str, ...]
    memory: StageMemory
    budget: Bytes | None  # of the first replica's device; None: no limit given
    reserve: Bytes  # what is kept free of it
    forward_seconds: Seconds
    backward_seconds: Seconds
    # Seconds that a process is busy with a pass: on a GPU with launching it, on a CPU with running it.
    forward_launch_seconds: Seconds = 0.0
    backward_launch_seconds: Seconds = 0.0
    # What goes to the host in forward, and comes back in backward, beside the computations: in one
    # direction. Copies that take turns with them are a part of the seconds above.
    host_copy_seconds: Seconds = 0.0
    host_copy_nbytes: Bytes = 0
    regions: tuple[Region, ...] = ()  # in the order of nodes; they do not overlap

    def __repr__(self) -> str:
        from placer.plan.summary import summarize_stage

        return f"<{summarize_stage(self)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that crosses from a stage to a later one, once per micro-batch forward."""

    value: str  # node name
    source: Annotated[Index, Field(alias="from")]  # stage index
    target: Annotated[Index, Field(alias="to")]  # stage index
    nbytes: Annotated[Bytes, Field(alias="bytes")]  # of one micro-batch
    seconds: Seconds = 0.0  # on the slower of the two devices' links


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What one device (it may hold several stages) is predicted to need, against its budget, in bytes.

    ``peak`` counts tensors; kernels take up to ``workspaces`` more at that time. torch's allocator takes
    ``reserved`` of the driver for both, at most within three steps: rounded up, and with the holes that
    nothing fits into (None: there is no such allocator on the device, or the step was not run through
    it). ``context`` is what the process takes besides. ``starved`` kernels of a step find less memory to
    work in than they want, and are slower.
    """

    device: str
    peak: Bytes
    budget: Bytes | None
    reserve: Bytes  # left free
    workspaces: Bytes = 0
    reserved: Bytes | None = None
    context: Bytes = 0
    starved: Index = 0
    allocator: AllocatorName | None = None

    @property
    def needed(self) -> int:
        """Bytes that the process takes of the device."""
        return self.context + (self.peak if self.reserved is None else self.reserved)

    @property
    def room(self) -> int | None:
        """Bytes of the budget that tensors and workspaces may take, below 0 where there is no room."""
        return None if self.budget is None else self.budget - self.reserve - self.context

    @property
    def headroom(self) -> int | None:
        """Bytes left under the budget, negative when it overflows."""
        return None if self.budget is None else self.budget - self.reserve - self.needed

    @property
    def fits(self) -> bool:
        return self.headroom is None or self.headroom >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeak:
    """What offloaded activations take of the host's memory, of all processes together, in bytes.

    ``peak`` is the most that waits there. ``reserved`` is what the host gives for it: what comes from a
    CUDA device waits in pinned memory, of which torch takes a power of two for every block. Both are
    estimates where the step was not run (None: the file of a placer that did not estimate it).
    """

    peak: Bytes
    reserved: Bytes | None
    budget: Bytes | None

    @property
    def needed(self) -> int:
        """Bytes that are taken of the host."""
        return self.peak if self.reserved is None else self.reserved

    @property
    def headroom(self) -> int | None:
        """Bytes left under the budget, negative when it overflows."""
        return None if self.budget is None else self.budget - self.needed

    @property
    def fits(self) -> bool:
        return self.headroom is None or self.headroom >= 0


def everything_fits(devices: Iterable[DevicePeak], host: HostPeak | None) -> bool:
    """Has every device what is needed of it, and the host, where something waits on it?"""
    return all(device.fits for device in devices) and (host is None or host.fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimality:
    """How good a placement is: none has a smaller value than ``lower_bound``.

    ``criterion`` says what ``value`` measures, and in which unit. The gap is 0 when the placement
    is proven optimal.
    """

    criterion: str
    value: float
    lower_bound: float

    @property
    def proven(self) -> bool:
        return self.gap <= 1e-9

    @property
    def gap(self) -> float:
        """(value - lower bound) / value."""
        return max(0.0, (self.value - self.lower_bound) / self.value) if self.value else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Why a stage ends where it does; loads and values are in the unit of `Optimality.criterion`.

    ``next_value`` is what the criterion would be with this boundary at the best other place on the
    plan's order of nodes, after ``next_best``, and the other boundaries free to move.
    """

    index: Index  # between the stages index and index + 1
    last: str  # the node before it, and
    first: str  # the one after it, in the plan's order
    left: float  # load of the stage before it
    right: float  # and of the one after
    nbytes: Bytes  # that cross it per micro-batch forward
    next_best: str | None  # None: it can be nowhere else
    next_value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The lock file of a placement; holds all that emission needs besides the model.

    Its fields and theirs are those of the JSON, in this order (`placer.plan.store`). ``devices`` are
    those of the first replica, then those of the second, and so on.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    fits: bool
    objective: Literal["throughput", "memory", "latency"]
    processes: bool  # made for one process per device
    replicas: Count
    microbatches: Count
    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]
    precision: Literal["fp32", "bf16", "fp16"]
    batch_norm: Literal["per_microbatch", "deferred", "sync"]
    optimizer: str | Mapping[str, Bytes]
    training: bool
    step_seconds: Seconds
    optimizer_seconds: Seconds = 0.0  # of these, once all gradients are there
    fingerprint: str  # of the captured model
    stages: tuple[StagePlan, ...]
    devices: tuple[DevicePeak, ...]
    transfers: tuple[Transfer, ...]
    checkpoint: tuple[str, ...]  # layers whose activations are recomputed
    offload: tuple[str, ...]  # layers whose activations wait in host memory
    notes: tuple[str, ...]
    optimality: Optimality | None  # None: a file of a placer that did not say
    extra_time: Optimality | None  # of what "auto" recomputes and offloads; None: nothing
    boundaries: tuple[Boundary, ...]
    node_layers: Mapping[str, str]  # node -> layer, for the diff of a changed model
    # How many micro-batches the example's rows make, where that is fewer than ``microbatches``.
    example_microbatches: Count | None = None
    host: HostPeak | None = None  # None: nothing is offloaded

    def __repr__(self) -> str:
        from placer.plan.summary import summarize_plan

        return summarize_plan(self)

    @property
    def parts(self) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[Region, ...], ...]]:
        """Per stage its nodes, and per stage its regions."""
        return tuple(s.nodes for s in self.stages), tuple(s.regions for s in self.stages)

    @property
    def device_of(self) -> tuple[int, ...]:
        """Per stage which of a replica's devices it is on, numbered in the order of their first stages."""
        return ranks_of([stage.devices[0] for stage in self.stages])

    @property
    def num_devices(self) -> int:
        """How many devices a replica has."""
        return max(self.device_of) + 1

    @property
    def tightest(self) -> DevicePeak:
        """The device with the least headroom."""
        return min(self.devices, key=lambda device: device.headroom or 0)

    @property
    def overflow_bytes(self) -> int:
        """What the tightest device, or the host, has too little of; 0 when the plan fits."""
        host = 0 if self.host is None else self.host.headroom or 0
        return max(0, -(self.tightest.headroom or 0), -host)

    @property
    def overlaps(self) -> bool:
        """Are offloaded activations copied beside the kernels?"""
        return any(region.overlapped for stage in self.stages for region in stage.regions)

    @property
    def fits_devices(self) -> bool:
        """Does every device have what the plan needs of it, whatever it needs of the host?"""
        return all(device.fits for device in self.devices)

    def explain(self) -> str:
        """Why each stage ends where it does: loads, bytes crossing, what the next-best cut costs."""
        from placer.plan.explain import explain_plan

        return explain_plan(self)
