"""Explains why a plan does not fit, and finds changes of the spec with which it would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from placer.cost import batch_rows
from placer.errors import BudgetError, PlacerError, Tried
from placer.plan.check import describe_overflow, host_error
from placer.plan.types import DevicePeak, Plan
from placer.planner.batch import microbatch_inputs, rows_of_step
from placer.planner.cut_limits import largest_piece
from placer.planner.devices import device_slot, likely_kernels
from placer.planner.resolve import planning_options
from placer.quantities import format_bytes, format_seconds
from placer.simulation.judge import JudgingPlanner
from placer.space import MOST_CHUNKS, find_joins
from placer.spec import DeviceSpec, PlacementSpec
from placer.spec.rows import shifted_rows

_MAX_DEVICES = 8
_MAX_ROUNDS = 4
_MICROBATCHES = (2, 4, 8, 16)
_REPLICAS = (2, 4, 8)
_SHARDS = (2, 4, 8)
_FAR = 1.15  # a rough plan with more than so many times a device's room is believed without a plan


class _Candidate(NamedTuple):
    """A change of a spec that has not been planned yet, and the spec with it."""

    what: str
    spec: PlacementSpec


class _Change(NamedTuple):
    """A change of a spec, and the plan with it."""

    what: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestNode:
    """The largest piece of a model that cannot be split, and the peak of a stage that has only that piece.

    ``node`` is the largest of its nodes.
    """

    node: str
    layer: str
    nbytes: int
    with_loss: bool

    def describe(self) -> str:
        """A clause for an error message."""
        return (
            f"the largest single node, {self.node} ({self.layer or 'the model'})"
            f"{' with the loss' * self.with_loss}, needs {format_bytes(self.nbytes)} on a device of its own"
        )


def misfit_error(spec: PlacementSpec, plan: Plan, make: JudgingPlanner) -> BudgetError:
    """The error that says why ``plan`` (the best under ``spec``) does not fit, and which changes help.

    Every change that it names has been planned with ``make``; the fastest one comes first.
    """
    if plan.fits_devices:
        return host_error(plan)
    largest = find_largest_node(spec, make)
    no_room = lacks_room(spec)
    problem = f"the placement needs {describe_overflow(plan.tightest)}"
    tried = try_remedies(spec, plan, make)
    fitting = [describe_fitting(t) for t in tried if t.fits]
    return BudgetError(
        f"device {plan.tightest.device}",
        problem if no_room else f"{problem}; {largest.describe()}",
        "tried, and it would fit: " + "; or ".join(fitting)
        if fitting
        else no_room or describe_tries(tried),
        device=plan.tightest.device,
        missing_bytes=plan.overflow_bytes,
        largest_node=largest.node,
        largest_node_bytes=largest.nbytes,
        tried=tried,
    )


def describe_fitting(tried: Tried) -> str:
    """A change that fits, with the time and the headroom that it gives."""
    facts = []
    if tried.step_seconds is not None:
        facts.append(f"{format_seconds(tried.step_seconds)} per step")
    if tried.headroom is not None:
        facts.append(f"{format_bytes(tried.headroom)} headroom")
    return f"{tried.change}: {', '.join(facts)}" if facts else tried.change


def describe_tries(tried: Sequence[Tried]) -> str:
    """One line on the changes that do not suffice, with the nearest of them."""
    if not tried:
        return "give more memory, or a smaller input"
    near = min(tried, key=lambda t: (-(t.headroom or 0), t.peak))
    return (
        f"none of {len(tried)} changes tried fits; the nearest is {near.change}: {describe_shortage(near)}; "
        "give more memory, or a smaller input"
    )


def describe_shortage(tried: Tried) -> str:
    """What a change that does not fit lacks, or the least that it needs."""
    if tried.headroom is None:
        return f"needs at least {format_bytes(tried.peak)} on a device"
    return f"{format_bytes(-tried.headroom)} too much"


def find_largest_node(spec: PlacementSpec, make: JudgingPlanner) -> LargestNode:
    """The piece that needs the most on a device of its own, for the whole batch at once."""
    program, inputs = make.program, make.inputs
    costs = make.costs(
        microbatch_inputs(program, inputs, batch_rows(program, inputs) or 1),
        training=spec.training,
        precision=spec.precision,
        kernels=likely_kernels(spec),
        loss=make.loss_of(spec),
    )
    options = planning_options(spec, (1,), processes=False)
    piece = largest_piece(program, costs, options, [device.name for device in spec.devices])
    cost_of = dict(zip(costs.names, costs.nodes, strict=False))
    node = max(
        piece.nodes, key=lambda n: cost_of[n].forward_transient + cost_of[n].backward_transient
    )
    return LargestNode(
        node=node, layer=program.nodes[node].layer, nbytes=piece.peak, with_loss=piece.with_loss
    )


def try_remedies(spec: PlacementSpec, plan: Plan, make: JudgingPlanner) -> list[Tried]:
    """Changes of ``spec`` that have been planned; ``plan`` is the one that does not fit.

    First come those that fit, the fastest first, then the others, the smallest change first. There are none
    if every device is filled by its reserve alone.
    """
    if lacks_room(spec):
        return []
    rows = 1 if make.program.captured.mixing else rows_of_step(make.program, spec) or 1
    changes = [
        *_first_that_fits(make, _own_placement(spec)),
        *_first_that_fits(make, _divided_state(spec, plan)),
        *_first_that_fits(make, _microbatches(spec, rows)),
        *_first_that_fits(make, _in_chunks(make, spec)),
        *_lighter(make, spec),
        *_first_that_fits(make, _devices(spec, plan)),
        *_first_that_fits(make, _in_space(spec, plan)),
        *_first_that_fits(make, _replicas(spec, rows, shared=True)),
        *_first_that_fits(make, _replicas(spec, rows, shared=False)),
    ]
    # A plan that does not fit by its estimates had no dry run, which counts more.
    changes = [c if c.plan.fits else c._replace(plan=make.judge(c.plan)) for c in changes]
    changes.sort(key=lambda c: (not c.plan.fits, c.plan.rank_time if c.plan.fits else 0.0))
    return [as_tried(*change) for change in changes]


def as_tried(change: str, plan: Plan) -> Tried:
    """A change of a spec, with what its ``plan`` needs."""
    fits = plan.fits
    return Tried(
        change=change,
        fits=fits,
        peak=plan.peak,
        step_seconds=plan.step_seconds if fits else None,
        headroom=plan.tightest.headroom if fits else -plan.overflow_bytes,
    )


def _first_that_fits(make: JudgingPlanner, candidates: Iterator[_Candidate]) -> list[_Change]:
    """The first candidate whose plan fits; if none does, the nearest of them; empty if there are none.

    Rough plans exclude those that are far from fitting, because each number of rows needs a run of the model
    for its costs.
    """
    far: list[tuple[int, _Candidate]] = []
    near: list[_Change] = []
    for candidate in candidates:
        if (peak := _peak_if_far(make, candidate.spec)) is not None:
            far.append((peak, candidate))
            continue
        planned = _try(make, candidate)
        if planned and planned[0].plan.fits:
            return planned
        near += planned
    if not near and far:
        near = _try(make, min(far, key=lambda rough: rough[0])[1])
    return sorted(near, key=lambda change: change.plan.peak)[:1]


def lacks_room(spec: PlacementSpec) -> str:
    """A sentence saying that no device has more memory than its reserve; "" if one has.

    In that case no placement fits, and no change of the placement helps.
    """
    slots = [device_slot(device, spec) for device in spec.devices]
    if any(slot.room is None or slot.room > 0 for slot in slots):
        return ""
    most = max(slots, key=lambda slot: slot.budget or 0)
    budget = most.budget or 0
    remedy = "give more memory"
    if most.context < budget:
        remedy += ', or write a smaller "reserve" into the spec'
    return (
        f"the context and the reserve alone take up {most.name}: {format_bytes(most.withheld)} of its "
        f"{format_bytes(budget)}, and no device has more: {remedy}"
    )


def _own_placement(spec: PlacementSpec) -> Iterator[_Candidate]:
    if spec.layers:
        change = "leave out 'layers': all of them are placed for you on these devices"
        yield _Candidate(change, spec.with_layers({}))


def _divided_state(spec: PlacementSpec, plan: Plan) -> Iterator[_Candidate]:
    """Optimizer state, and then gradients, that are divided over the replicas and shards there are."""
    ranks = plan.replicas * plan.shards
    if not plan.processes or not spec.training or ranks == 1:
        return
    parts = {"optimizer": "the optimizer's state", "gradients": "that and the gradients"}
    more = {"none": ("optimizer", "gradients"), "optimizer": ("gradients",)}
    for state in more.get(spec.shard_state, ()):
        change = f'"shard_state": "{state}" (each of {ranks} ranks keeps a part of {parts[state]})'
        yield _Candidate(change, _updated(spec, shard_state=state))


def _microbatches(spec: PlacementSpec, batch_size: int) -> Iterator[_Candidate]:
    """More micro-batches, the fewest first, under the given schedule or 1F1B, which needs less memory."""
    if spec.microbatches == "auto":
        return
    replicas = spec.replicas if isinstance(spec.replicas, int) else 1
    schedules = [spec.schedule] if spec.schedule == "auto" else [spec.schedule, "1F1B"]
    for count in _MICROBATCHES:
        if int(spec.microbatches) < count <= batch_size // replicas:
            for schedule in dict.fromkeys(schedules):
                new = "" if schedule == spec.schedule else f', "schedule": "{schedule}"'
                change = f'split the batch: "microbatches": {count}{new}'
                yield _Candidate(change, _updated(spec, microbatches=count, schedule=schedule))


def _peak_if_far(make: JudgingPlanner, spec: PlacementSpec) -> int | None:
    """The largest peak in a rough plan, if by that ``spec`` is far from fitting; otherwise None."""
    rough = _plan(make.rough_plan, spec)
    if rough is None:
        return None
    far = (d.room is not None and d.peak > _FAR * d.room for d in rough.devices)
    return rough.peak if any(far) else None


def _in_chunks(make: JudgingPlanner, spec: PlacementSpec) -> Iterator[_Candidate]:
    if spec.chunks == 1 and not spec.compile and find_joins(make.program):
        change = f'"chunks": {MOST_CHUNKS} (a concatenation is made in parts, where convolutions read it)'
        yield _Candidate(change, _updated(spec, chunks=MOST_CHUNKS))


def _in_space(spec: PlacementSpec, plan: Plan) -> Iterator[_Candidate]:
    """One stage on as many shards as should suffice: on the given devices, or on more like the last of them.

    Only one number is tried, because every number needs another run of the model.
    """
    if not isinstance(spec.space.shards, int) or spec.replica_devices or spec.compile:
        return
    least = max(spec.space.shards + 1, len(spec.devices), _fewest_devices(plan))
    if count := next((n for n in _SHARDS if n >= least), 0):
        devices, more = _with_more_devices(spec, count)
        change = (
            f'"space": {count}, "chunks": {MOST_CHUNKS}'
            + f" and more devices ({more})" * bool(more)
            + " without 'layers'" * bool(spec.layers)
            + ": every device has a part of the input"
        )
        space = spec.space.model_copy(update={"shards": count, "grid": ()})
        wanted = spec.with_layers({}).with_devices(devices)
        yield _Candidate(change, _updated(wanted, space=space, chunks=MOST_CHUNKS))


def _lighter(make: JudgingPlanner, spec: PlacementSpec) -> Iterator[_Change]:
    """Recomputing and offloading; both only if neither of them is enough."""
    if not spec.training:
        return
    does = {"checkpoint": "recomputed in backward", "offload": "kept in host memory"}
    fits = False
    for fields in (("checkpoint",), ("offload",), ("checkpoint", "offload")):
        if (len(fields) == 2 and fits) or any(getattr(spec, f) == "auto" for f in fields):
            continue
        words = " and ".join(f'"{field}": "auto"' for field in fields)
        change = f"{words} (activations are {' or '.join(does[field] for field in fields)})"
        planned = _try(make, _Candidate(change, _updated(spec, **dict.fromkeys(fields, "auto"))))
        yield from planned
        fits = any(change.plan.fits for change in planned)


def _devices(spec: PlacementSpec, plan: Plan) -> Iterator[_Candidate]:
    """More devices like the last, the fewest first, up to eight in all."""
    given = len(spec.devices)
    if spec.space.number > 1:
        return
    for count in range(min(max(given + 1, _fewest_devices(plan)), _MAX_DEVICES), _MAX_DEVICES + 1):
        if (more := count - given) > 0:
            devices, added = _with_more_devices(spec, count)
            change = (
                f"add {more} device{'s' * (more > 1)} like {spec.devices[-1].name} ({added})"
                + " and leave out 'layers'" * bool(spec.layers)
            )
            wanted = spec.with_layers({}).with_devices(devices)
            yield _Candidate(change, _updated(wanted, replica_devices=()))


def _replicas(spec: PlacementSpec, rows: int, *, shared: bool) -> Iterator[_Candidate]:
    """More replicas, the fewest first: if ``shared``, on the given devices, otherwise on more of them.

    Each has an equal part of the batch, which must have a row for each of its micro-batches. Given devices
    are shared if they are alike.
    """
    given = [device.name for device in spec.devices]
    cut = spec.microbatches if isinstance(spec.microbatches, int) else 1
    alike = len({device.model_copy(update={"name": ""}) for device in spec.devices}) == 1
    if spec.replicas != 1 or spec.space.number > 1:
        return
    for count in _REPLICAS:
        own = len(given) // count if shared else len(given)
        own_rows = shifted_rows(given[:own], count)
        names = {name for row in own_rows for name in row}
        possible = names == set(given) and alike if shared else len(names) <= _MAX_DEVICES
        if count * cut > rows or not possible:
            continue
        wanted = _updated(spec.with_devices(spec.devices[:own]), replicas=count)
        if outside := not set(spec.layers.values()).issubset(given[:own]):
            wanted = wanted.with_layers({})
        others = "; ".join(", ".join(row) for row in own_rows[1:])
        change = (
            f'"replicas": {count}'
            + f", and only {', '.join(given[:own])} as devices" * shared
            + ", without 'layers'" * outside
            + f": {'another is' if count == 2 else 'others are'} on {others}, "
            + f"each with 1/{count} of the batch"
        )
        yield _Candidate(change, wanted)


def _fewest_devices(plan: Plan) -> int:
    """A lower bound on the number of devices: the sum of the plan's peaks over the largest budget."""
    largest = max((d.room for d in plan.devices if d.room is not None), default=0)
    row = plan.devices[: plan.num_devices]
    return -(-sum(device.peak for device in row) // largest) if largest > 0 else 1


def memory_needed(spec: PlacementSpec, make: JudgingPlanner) -> str:
    """A remedy that gives the memory each device would need."""
    needed = _memory_needed(_updated(spec, objective="memory"), make)
    if needed is None:
        return "use a smaller input"
    return f"devices of {format_bytes(needed, enough=True)} (reserve included) each, or a smaller input"


def _memory_needed(spec: PlacementSpec, make: JudgingPlanner) -> int | None:
    """Bytes per device, including the reserve, with which a plan for ``spec`` fits; None if not found."""
    made = _plan(make, spec)
    for _ in range(_MAX_ROUNDS):
        if made is None:
            return None
        needed = max(map(_memory_for, made.devices))
        devices = [d.model_copy(update={"memory": needed}) for d in spec.devices]
        made = _plan(make, spec.with_devices(devices))
        if made is not None and made.fits:
            return needed
    return None


def _memory_for(device: DevicePeak) -> int:
    """Bytes of a device with which ``device`` would fit; its reserve is a share of the memory."""
    if device.budget is None or device.budget <= device.reserve:
        return device.needed + device.reserve
    return math.ceil(device.needed * device.budget / (device.budget - device.reserve))


def _with_more_devices(spec: PlacementSpec, count: int) -> tuple[list[DeviceSpec], str]:
    """At least ``count`` devices, and the names of the new ones."""
    new = more_like(spec.devices, max(0, count - len(spec.devices)))
    return [*spec.devices, *new], ", ".join(device.name for device in new)


def more_like(devices: Sequence[DeviceSpec], count: int) -> list[DeviceSpec]:
    """So many more devices like the last one, with the lowest free numbers from 1 on."""
    last = devices[-1]
    kind = last.name.partition(":")[0]
    taken = {device.name for device in devices}
    names = (f"{kind}:{i}" for i in range(1, len(devices) + count + 1))
    free = [name for name in names if name not in taken]
    return [last.model_copy(update={"name": name}) for name in free[:count]]


def _updated(spec: PlacementSpec, **fields: Any) -> PlacementSpec:
    return spec.model_copy(update=fields)


def _try(make: JudgingPlanner, candidate: _Candidate) -> list[_Change]:
    """The plan that a user would get if it can fit, otherwise that of least memory; none if there is none."""
    planned = _plan(make.quick_plan, candidate.spec)
    if planned is not None and planned.fits:
        planned = _plan(make, candidate.spec)
    return [] if planned is None else [_Change(candidate.what, planned)]


def _plan(make: Callable[[PlacementSpec], Plan], spec: PlacementSpec) -> Plan | None:
    """The result of ``make(spec)``; None if a change that was made contradicts the rest of the spec."""
    try:
        return make(spec)
    except PlacerError:
        return None
