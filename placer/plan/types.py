"""A plan: the complete placement of a model, and the memory and time that it is expected to take.

pydantic reads and writes plan files by the annotations of these dataclasses (`placer.plan.store`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

from placer.grid import Grid, NodeLayout
from placer.regions.types import Region
from placer.schedule import ranks_of
from placer.spec.fields import (
    MOST,
    AllocatorName,
    BatchNormMode,
    Objective,
    Precision,
    ScheduleName,
    StoredRule,
)
from placer.spec.loss import LossSpec
from placer.spec.rewrite import Rewrite
from placer.state_layout import ShardState, StateLayout, layout_of

Bytes = Annotated[int, Field(ge=0, le=2**63 - 1)]  # torch counts bytes in an int64
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Seconds = Annotated[float, Field(ge=0)] | None  # None: the kind of a device is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Predicted bytes of one stage on one device over a training step, by kind.

    ``saved`` are the activations of all micro-batches in flight, at their most. ``boundary`` is what
    was received from other stages and is not saved. ``transient`` is everything else that is alive at
    the peak. ``peak`` is the maximum over time, without the reserve: at most the sum of the kinds.
    """

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: Bytes
    saved: Bytes
    boundary: Bytes
    transient: Bytes
    peak: Bytes

    @property
    def state(self) -> int:
        """Bytes that exist for the whole step: parameters, buffers and the optimizer's state."""
        return self.parameters + self.buffers + self.optimizer

    @property
    def kept(self) -> int:
        """The state, with all gradients and saved activations."""
        return self.state + self.gradients + self.saved


# Of a stage that is only laid out in time
NO_MEMORY = StageMemory(
    parameters=0, gradients=0, optimizer=0, buffers=0, saved=0, boundary=0, transient=0, peak=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: its nodes, its device in every replica, and its memory and time.

    ``memory`` is that of the first replica. Times are for one micro-batch.
    """

    index: Index
    devices: tuple[str, ...]  # one per replica, or of each replica one per shard
    layers: tuple[str, ...]  # modules entirely or partly on this stage, in program order
    nodes: tuple[str, ...]
    memory: StageMemory
    budget: Bytes | None  # of the first replica's device; None: no limit is known
    reserve: Bytes  # the part of the budget that is left free, without the context
    forward_seconds: Seconds
    backward_seconds: Seconds
    # Time that the process is busy: on a GPU, to launch the kernels; on a CPU, to run them.
    forward_launch_seconds: Seconds = 0.0
    backward_launch_seconds: Seconds = 0.0
    # Offloaded tensors that are copied while kernels run, in one direction: to the host in forward,
    # and back in backward. Copies that do not overlap are part of the seconds above.
    host_copy_seconds: Seconds = 0.0
    host_copy_nbytes: Bytes = 0
    # To sum its gradients over replicas and shards, between processes, and to divide them after each
    # micro-batch if they are; in one process, to copy them once
    sum_seconds: Seconds = 0.0
    # What each shard sends to the others in forward and backward of a micro-batch, recomputation not counted
    exchanged_nbytes: Bytes = 0
    regions: tuple[Region, ...] = ()  # in the order of nodes; they do not overlap

    def __repr__(self) -> str:
        from placer.plan.summary import summarize_stage

        return f"<{summarize_stage(self)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that is sent from a stage to a later one, once per micro-batch in forward."""

    value: str  # node name
    source: Annotated[Index, Field(alias="from")]  # stage index
    target: Annotated[Index, Field(alias="to")]  # stage index
    nbytes: Annotated[Bytes, Field(alias="bytes")]  # of one micro-batch
    seconds: Seconds = 0.0  # at the bandwidth of the slower of the two devices' links


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Bytes that one device, with all of its stages, is predicted to need, and its budget.

    ``peak`` counts tensors. Kernels need up to ``workspaces`` more at that time. ``reserved`` is what
    torch's allocator takes of the driver for both, the most within three steps, including rounding and
    fragmentation. It is None if the device has no such allocator, or if the step was not run through
    the model of it. ``context`` is what the process takes in addition. ``starved`` is the number of
    kernels in a step that find less workspace than they want, and so are slower.
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
        """Bytes of the budget for tensors and workspaces; negative if context and reserve exceed it."""
        return None if self.budget is None else self.budget - self.reserve - self.context

    @property
    def headroom(self) -> int | None:
        """Bytes left under the budget, negative when it overflows."""
        return None if self.budget is None else self.budget - self.reserve - self.needed

    @property
    def share(self) -> float | None:
        """The share of the budget that is needed, including the reserve."""
        return (self.needed + self.reserve) / self.budget if self.budget else None

    @property
    def fits(self) -> bool:
        return self.headroom is None or self.headroom >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeak:
    """Bytes of host memory that the offloaded activations of all processes take.

    ``peak`` is the most that is offloaded at a time. ``reserved`` is the memory that this takes: for
    CUDA devices it is pinned memory, and torch rounds every block up to a power of two. Both are
    estimates if there was no dry run. ``reserved`` is None in a file of an older placer.
    """

    peak: Bytes
    reserved: Bytes | None
    budget: Bytes | None

    @property
    def needed(self) -> int:
        """Bytes of host memory that are taken."""
        return self.peak if self.reserved is None else self.reserved

    @property
    def headroom(self) -> int | None:
        """Bytes left under the budget, negative when it overflows."""
        return None if self.budget is None else self.budget - self.needed

    @property
    def fits(self) -> bool:
        return self.headroom is None or self.headroom >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoss:
    """The loss that a plan counts, named as in a spec, and the most bytes that it takes at a time.

    These are what the loss makes, with its target, for one micro-batch on the last stage's device. It is
    ``assumed`` if the spec does not name one. A name in <> is of a function that only its caller has.
    """

    function: str
    target: tuple[str, ...] = ()
    assumed: bool = False
    nbytes: Annotated[Bytes, Field(alias="bytes")] = 0
    whole_batch: bool = False  # it is computed once, over all micro-batches and replicas

    @property
    def spec(self) -> LossSpec | None:
        """The loss as a spec names it; None if it is assumed, or has no such name."""
        if self.assumed or self.function.startswith("<"):
            return None
        return LossSpec(function=self.function, target=self.target, whole_batch=self.whole_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another strategy that `auto` looked at, and why it lost.

    ``slower`` is its time per step divided by the plan's, by reference rates where the kind of a device is
    not known; None if no plan was made. ``judged``: a dry run decided whether it fits. ``peak`` is the
    largest of a device, in bytes, or a lower bound on it where no plan was made.
    """

    strategy: str
    devices: Count
    fits: bool
    judged: bool
    step_seconds: Seconds
    slower: Annotated[float, Field(ge=0)] | None
    peak: Bytes
    headroom: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The command that made a plan, as text, and what it made it of.

    ``options`` are the values of the options that name ``model`` and its inputs, which are described in
    ``inputs``. ``spec`` is JSON. ``kinds`` are those of the devices.
    """

    command: str
    model: str
    options: Mapping[str, str | bool | list[str]]
    inputs: str
    spec: str
    kinds: tuple[str, ...]


def everything_fits(devices: Iterable[DevicePeak], host: HostPeak | None) -> bool:
    """Is every device within its budget, and the host, if anything is offloaded?"""
    return all(device.fits for device in devices) and (host is None or host.fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimality:
    """How good a placement is: no placement has a smaller value than ``lower_bound``.

    ``criterion`` says what ``value`` measures, and in which unit. The bound, 0 if none is known, leaves
    out what crosses boundaries and what an order needs, so a placement above it may still be the best.
    """

    criterion: str
    value: float
    lower_bound: float

    @property
    def above(self) -> float:
        """The share by which the value is above the lower bound; infinite without a bound."""
        return self.value / self.lower_bound - 1 if self.lower_bound else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Why a stage ends where it does; loads and values are in the unit of `Optimality.criterion`.

    ``next_best`` is the node after which the boundary would be best if it were elsewhere in the plan's
    order of nodes, with the other boundaries free to move. ``next_value`` is the criterion then.
    """

    index: Index  # it is between the stages index and index + 1
    last: str  # the node before the boundary in the plan's order
    first: str  # the node after it
    load_before: float  # of the stage before it
    load_after: float  # of the stage after it
    nbytes: Bytes  # bytes that cross it per micro-batch in forward
    next_best: str | None  # None: no other place is possible
    next_value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The complete placement of a model. With the model itself, it is enough to generate the stages.

    The fields, in this order, are the keys of the JSON (`placer.plan.store`). ``devices`` are those of
    the first replica, then those of the second, and so on.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # The seconds of a step, to compare plans of one model; by reference rates where the kind of a device is
    # not known. Not in files, and 0 in a plan that was read from one.
    rank_time: Annotated[float, Field(exclude=True)] = field(default=0.0, compare=False, repr=False)
    fits: bool
    objective: Objective
    processes: bool  # made for one process per device
    replicas: Count
    microbatches: Count
    schedule: ScheduleName
    precision: Precision
    batch_norm: BatchNormMode
    optimizer: str | Mapping[str, Bytes]
    training: bool
    step_seconds: Seconds
    optimizer_seconds: Seconds = 0.0  # the part of step_seconds that is the optimizer's step
    fingerprint: str  # of the captured model
    stages: tuple[StagePlan, ...]
    devices: tuple[DevicePeak, ...]
    transfers: tuple[Transfer, ...]
    checkpoint: tuple[str, ...]  # layers whose activations are recomputed
    offload: tuple[str, ...]  # layers whose saved activations are kept in host memory
    notes: tuple[str, ...]
    optimality: Optimality
    extra_seconds: Seconds  # of a micro-batch, in all stages, by the choice of "auto"
    boundaries: tuple[Boundary, ...]
    node_layers: Mapping[str, str]  # node -> layer, for the diff of a changed model
    shards: Count = 1  # of every stage in space
    batch: Count | None = (
        None  # rows of a step, if the spec says so; None: as many as the example has
    )
    rows: Count | None = None  # of the step that was planned; None: an older file, or no batch
    # How many micro-batches the rows of the example input make, if fewer than ``microbatches``.
    example_microbatches: Count | None = None
    host: HostPeak | None = None  # None: nothing is offloaded
    loss: PlannedLoss | None = None  # None: inference, or a file of an older placer
    # The spec's ``inputs``: pattern -> dimension of the batch, None for inputs that are whole.
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    stored: Mapping[str, StoredRule] = field(default_factory=dict)
    # Of the captured graph, in the order in which they are applied:
    rewrites: tuple[Rewrite, ...] = ()
    shard_state: ShardState = "none"
    shard_over: Count | None = None  # replicas between which the state is divided; None: all
    node_layout: NodeLayout = "stages"
    compile: bool = False  # the code of stages, with torch.compile
    # If it was chosen by `auto`: how it trains, and the best of each other way
    strategy: str = ""
    alternatives: tuple[Alternative, ...] = ()
    # If a command made it
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        from placer.plan.summary import summarize_plan

        return summarize_plan(self)

    @property
    def device_of(self) -> tuple[int, ...]:
        """Per stage the number of its device in a replica; devices are numbered by their first stages."""
        return ranks_of([stage.devices[0] for stage in self.stages])

    @property
    def grid(self) -> Grid:
        """The grid of the devices, one rank each."""
        return Grid(
            replicas=self.replicas,
            devices=max(self.device_of) + 1,
            shards=self.shards,
            node_layout=self.node_layout,
        )

    @property
    def state_layout(self) -> StateLayout:
        """How training state is divided over ranks."""
        return layout_of(
            self.shard_state,
            replicas=self.replicas,
            shards=self.shards,
            shard_over=self.shard_over,
        )

    @property
    def num_devices(self) -> int:
        """The number of devices of a replica, all shards together."""
        return self.grid.devices * self.shards

    def devices_of(self, stage: StagePlan, replica: int) -> tuple[str, ...]:
        """The devices of the shards of ``stage`` in a replica."""
        return stage.devices[replica * self.shards : (replica + 1) * self.shards]

    @property
    def sent(self) -> tuple[Transfer, ...]:
        """The transfers of tensors from one device to another."""
        device = self.device_of
        return tuple(t for t in self.transfers if t.nbytes and device[t.source] != device[t.target])

    @property
    def tightest(self) -> DevicePeak:
        """The device with the least headroom."""
        return min(self.devices, key=lambda device: device.headroom or 0)

    @property
    def peak(self) -> int:
        """The largest peak of a device, in bytes."""
        return max(device.peak for device in self.devices)

    @property
    def overflow_bytes(self) -> int:
        """Bytes by which the tightest device, or the host, exceeds its budget; 0 if the plan fits."""
        host = 0 if self.host is None else self.host.headroom or 0
        return max(0, -(self.tightest.headroom or 0), -host)

    @property
    def starved(self) -> int:
        """The kernels of a step, on all devices, that find no room for the workspace that they want."""
        return sum(device.starved for device in self.devices)

    @property
    def overlaps(self) -> bool:
        """Are any offloaded activations copied while kernels run?"""
        return any(region.overlapped for stage in self.stages for region in stage.regions)

    @property
    def fits_devices(self) -> bool:
        """Is every device within its budget, whatever is needed of the host?"""
        return all(device.fits for device in self.devices)

    def explain(self) -> str:
        """Explain why each stage ends where it does: loads, bytes crossing, and the next best cut."""
        from placer.plan.explain import explain_plan

        return explain_plan(self)
