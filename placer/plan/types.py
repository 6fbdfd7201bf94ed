"""A plan: the fully resolved placement, and what it is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from placer.regions.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Predicted bytes of one stage on one device over a training step, by kind.

    ``saved`` counts every micro-batch in flight at its peak; ``boundary`` what was received and is
    not saved; ``transient`` the rest that is live at the peak's moment. ``peak`` is the largest sum
    over time, without the reserve: at most the sum of the kinds.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    saved: int = 0
    boundary: int = 0
    transient: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: its nodes, its device in every replica, and what it costs there.

    ``memory`` is in bytes, that of the first replica; times are in seconds, of one micro-batch.
    """

    index: int
    devices: tuple[str, ...]  # one per replica
    layers: tuple[str, ...]  # modules wholly or partly on this stage, in program order
    nodes: tuple[str, ...]
    memory: StageMemory
    budget: int | None  # bytes of the first replica's device; None: no limit given
    reserve: int  # bytes of it that are kept free
    forward_seconds: float
    backward_seconds: float
    regions: tuple[Region, ...] = ()  # in the order of nodes; they do not overlap

    def __repr__(self) -> str:
        from placer.plan.summary import summarize_stage

        return f"<{summarize_stage(self)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that crosses from a stage to a later one, once per micro-batch forward."""

    value: str  # node name
    source: int  # stage index; "from" in JSON
    target: int  # stage index; "to" in JSON
    nbytes: int  # of one micro-batch; "bytes" in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Predicted peak of one device (it may hold several stages) against its budget, in bytes."""

    device: str
    peak: int
    budget: int | None
    reserve: int

    @property
    def fits(self) -> bool:
        return self.budget is None or self.peak + self.reserve <= self.budget

    @property
    def headroom(self) -> int | None:
        """Bytes left under the budget, negative when it overflows."""
        return None if self.budget is None else self.budget - self.reserve - self.peak


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

    index: int  # between the stages index and index + 1
    last: str  # the node before it, and
    first: str  # the one after it, in the plan's order
    left: float  # load of the stage before it
    right: float  # and of the one after
    nbytes: int  # that cross it per micro-batch forward
    next_best: str | None = None  # None: it can be nowhere else
    next_value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The lock file of a placement; holds all that emission needs besides the model."""

    fits: bool
    objective: str
    replicas: int
    microbatches: int
    schedule: str
    precision: str
    batch_norm: str
    optimizer: str | Mapping[str, int]
    training: bool
    step_seconds: float
    fingerprint: str
    stages: tuple[StagePlan, ...]
    devices: tuple[DevicePeak, ...]
    transfers: tuple[Transfer, ...]
    checkpoint: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    optimality: Optimality | None = None  # None: a file of a placer that did not say
    extra_time: Optimality | None = None  # of what "auto" recomputes and offloads; None: nothing
    boundaries: tuple[Boundary, ...] = ()
    node_layers: Mapping[str, str] = field(default_factory=dict)  # for the diff of a changed model
    processes: bool = False  # made for one process per device

    def __repr__(self) -> str:
        from placer.plan.summary import summarize_plan

        return summarize_plan(self)

    @property
    def parts(self) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[Region, ...], ...]]:
        """Per stage its nodes, and per stage its regions."""
        return tuple(s.nodes for s in self.stages), tuple(s.regions for s in self.stages)

    @property
    def tightest(self) -> DevicePeak:
        """The device with the least headroom."""
        return min(self.devices, key=lambda device: device.headroom or 0)

    @property
    def overflow_bytes(self) -> int:
        """What the tightest device has too little of; 0 when the plan fits."""
        return max(0, -(self.tightest.headroom or 0))

    def explain(self) -> str:
        """Why each stage ends where it does: loads, bytes crossing, what the next-best cut costs."""
        from placer.plan.explain import explain_plan

        return explain_plan(self)
