"""Explains why a plan does not fit, and finds changes of the spec with which it would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from placer.cost import batch_rows
from placer.errors import BudgetError, PlacerError, Tried
from placer.plan.check import describe_overflow, host_error
from placer.plan.types import DevicePeak, Plan
from placer.planner.build import PlanMaker
from placer.planner.cut_limits import largest_piece
from placer.planner.devices import device_slot, likely_kernels
from placer.planner.resolve import microbatch_inputs, planning_options
from placer.quantities import format_bytes, format_seconds, parse_bytes
from placer.space import MOST_CHUNKS, find_joins
from placer.spec import DeviceSpec, PlacementSpec
from placer.spec.rows import shifted_rows

_MAX_DEVICES = 8
_MAX_ROUNDS = 4
_MICROBATCHES = (2, 4, 8, 16)
_REPLICAS = (2, 4, 8)
_SHARDS = (2, 4, 8)
_FAR = 1.15  # a rough plan with more than so many times a device's room is believed without a plan


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of a spec, and the plan with it."""

    what: str
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def peak(self) -> int:
        """The largest peak of a device."""
        return max(device.peak for device in self.plan.devices)


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


def misfit_error(spec: PlacementSpec, plan: Plan, make: PlanMaker) -> BudgetError:
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
    near = min(tried, key=lambda t: t.peak)
    return (
        f"none of {len(tried)} changes tried fits; the nearest is to {near.change}, with a peak of "
        f"{format_bytes(near.peak)}; give more memory, or a smaller input"
    )


def find_largest_node(spec: PlacementSpec, make: PlanMaker) -> LargestNode:
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


def try_remedies(spec: PlacementSpec, plan: Plan, make: PlanMaker) -> list[Tried]:
    """Changes of ``spec`` that have been planned; ``plan`` is the one that does not fit.

    First come those that fit, the fastest first, then the others, the smallest change first. There are none
    if every device is filled by its reserve alone.
    """
    if lacks_room(spec):
        return []
    rows = 1 if make.program.captured.mixing else make.program.call.batch_size or 1
    changes = [
        *_expandable(make, spec),
        *_own_placement(make, spec),
        *_divided_state(make, spec, plan),
        *_microbatches(make, spec, rows),
        *_in_chunks(make, spec),
        *_lighter(make, spec),
        *_devices(make, spec, plan),
        *_in_space(make, spec, plan),
        *_replicas(make, spec, rows),
    ]
    changes.sort(key=lambda c: (not c.fits, c.plan.rank_time if c.fits else 0.0))
    return [
        Tried(
            change=change.what,
            fits=change.fits,
            peak=change.peak,
            step_seconds=change.plan.step_seconds if change.fits else None,
            headroom=change.plan.tightest.headroom if change.fits else None,
        )
        for change in changes
    ]


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


def _expandable(make: PlanMaker, spec: PlacementSpec) -> Iterator[_Change]:
    """Expandable segments on every device for which the spec asks for torch's own default."""
    devices = [
        d.model_copy(update={"allocator": "expandable"}) if d.allocator == "default" else d
        for d in spec.devices
    ]
    if devices != list(spec.devices):
        change = 'leave out "allocator": "default" (segments that grow lose less memory)'
        yield from _try(change, make, spec.with_devices(devices))


def _own_placement(make: PlanMaker, spec: PlacementSpec) -> Iterator[_Change]:
    if spec.layers:
        change = "leave out 'layers': all of them are placed for you on these devices"
        yield from _try(change, make, spec.with_layers({}))


def _divided_state(make: PlanMaker, spec: PlacementSpec, plan: Plan) -> Iterator[_Change]:
    """Optimizer state that is divided over the replicas and shards there are."""
    ranks = plan.replicas * plan.shards
    if plan.processes and spec.training and spec.shard_state == "none" and ranks > 1:
        change = f'"shard_state": "optimizer" (each of {ranks} ranks keeps a part of the optimizer\'s state)'
        yield from _try(change, make, _updated(spec, shard_state="optimizer"))


def _microbatches(make: PlanMaker, spec: PlacementSpec, batch_size: int) -> Iterator[_Change]:
    """The fewest micro-batches that fit, under the given schedule or 1F1B; otherwise the nearest.

    Each size of micro-batch needs a run of the model for its costs. So guesses from known costs first
    exclude the numbers of micro-batches that are far from fitting.
    """
    if spec.microbatches == "auto":
        return
    replicas = spec.replicas if isinstance(spec.replicas, int) else 1
    rows = batch_size // replicas
    far: list[tuple[int, str, PlacementSpec]] = []
    tried: list[_Change] = []
    for count in _MICROBATCHES:
        if not int(spec.microbatches) < count <= rows:
            continue
        fitting: _Change | None = None
        for schedule in _schedules(spec):
            new = "" if schedule == spec.schedule else f', "schedule": "{schedule}"'
            change = f'split the batch: "microbatches": {count}{new}'
            wanted = _updated(spec, microbatches=count, schedule=schedule)
            if (peak := _peak_if_far(make, wanted)) is not None:
                far.append((peak, change, wanted))
                continue
            now = next(_try(change, make, wanted), None)
            if now is not None:
                tried.append(now)
                fitting = now if now.fits else fitting
            if fitting is None and spec.schedule == "GPipe":
                break  # GPipe needs at least the memory of 1F1B
        if fitting is not None:
            yield fitting
            return
    if not tried and far:
        _, change, wanted = min(far, key=lambda rough: rough[0])
        tried += _try(change, make, wanted)
    yield from sorted(tried, key=lambda t: t.peak)[:1]


def _schedules(spec: PlacementSpec) -> list[str]:
    """1F1B and the spec's own schedule; the last one that fits is used."""
    return ["auto"] if spec.schedule == "auto" else list(dict.fromkeys(("1F1B", spec.schedule)))


def _peak_if_far(make: PlanMaker, spec: PlacementSpec) -> int | None:
    """The largest peak in a rough plan, if by that ``spec`` is far from fitting; otherwise None."""
    rough = _plan(make.rough_plan, spec)
    if rough is None:
        return None
    far = (d.room is not None and d.peak > _FAR * d.room for d in rough.devices)
    return max(device.peak for device in rough.devices) if any(far) else None


def _in_chunks(make: PlanMaker, spec: PlacementSpec) -> Iterator[_Change]:
    if spec.chunks == 1 and not spec.compile and find_joins(make.program):
        change = f'"chunks": {MOST_CHUNKS} (a concatenation is made in parts, where convolutions read it)'
        yield from _try(change, make, _updated(spec, chunks=MOST_CHUNKS))


def _in_space(make: PlanMaker, spec: PlacementSpec, plan: Plan) -> Iterator[_Change]:
    """One stage on as many shards as should suffice: on the given devices, or on more like the last of them.

    Only one number is tried, because every number needs another run of the model.
    """
    if not isinstance(spec.space.shards, int) or spec.replica_devices or spec.compile:
        return
    devices = list(spec.devices)
    least = max(spec.space.shards + 1, len(devices), _fewest_devices(plan))
    count = next((n for n in _SHARDS if n >= least), None)
    if count is None:
        return
    while len(devices) < count:
        devices.append(_next_device(devices))
    more = ", ".join(d.name for d in devices[len(spec.devices) :])
    change = (
        f'"space": {count}, "chunks": {MOST_CHUNKS}'
        + f" and more devices ({more})" * bool(more)
        + " without 'layers'" * bool(spec.layers)
        + ": every device has a part of the input"
    )
    space = spec.space.model_copy(update={"shards": count, "grid": ()})
    wanted = _updated(spec.with_layers({}).with_devices(devices), space=space)
    yield from _try(change, make, _updated(wanted, chunks=MOST_CHUNKS))


def _lighter(make: PlanMaker, spec: PlacementSpec) -> Iterator[_Change]:
    if not spec.training:
        return
    ways: tuple[dict[str, str], ...] = (
        {"checkpoint": "auto"}, {"offload": "auto"}, {"checkpoint": "auto", "offload": "auto"},
    )  # fmt: skip
    enough = offloading = False  # is one of them enough; is offloading, within the host's limit?
    for way in ways:
        if enough and len(way) == 2:
            break
        new = {field: "auto" for field in way if getattr(spec, field) != "auto"}
        if len(new) < len(way):
            continue
        words = " and ".join(f'"{field}": "auto"' for field in new)
        does = {"checkpoint": "recompute in the backward pass", "offload": "wait in host memory"}
        what = " or ".join(does[field] for field in new)
        tried = list(_try(f"{words} ({what})", make, _updated(spec, **new)))
        yield from tried
        fits = any(t.fits for t in tried)
        enough = enough or fits
        offloading = offloading or (fits and "offload" in way)
    if not offloading:
        yield from _more_host_memory(make, spec)


def _more_host_memory(make: PlanMaker, spec: PlacementSpec) -> Iterator[_Change]:
    """The host memory with which offloading suffices, where ``spec`` limits it and that is too little."""
    if spec.host_memory is None:
        return
    plan = _plan(make.quick_plan, _updated(spec, offload="auto", host_memory=None))
    if plan is not None and plan.fits and plan.host is not None:
        needed = format_bytes(plan.host.needed, enough=True).replace(" ", "")
        more = f'"host_memory": "{needed}"'
        change = more if spec.offload == "auto" else f'"offload": "auto" and {more}'
        enough = _updated(spec, offload="auto", host_memory=parse_bytes(needed))
        yield from _try(f"{change} (wait in host memory)", make, enough)


def _devices(make: PlanMaker, spec: PlacementSpec, plan: Plan) -> Iterator[_Change]:
    """The fewest additional devices that fit, up to eight in all; if none do, all eight.

    More devices never need more memory each. So `_fewest_devices` is tried first, because it is often
    enough, then all eight, and if these fit, the numbers between them by bisection.
    """
    given = len(spec.devices)
    fewest, most = max(given + 1, _fewest_devices(plan)), _MAX_DEVICES
    if most <= given or spec.space.number > 1:
        return
    fewest = min(fewest, most)
    tried = _with_devices(make, spec, fewest)
    if fewest == most or (tried is not None and tried.fits):
        yield from [tried] if tried is not None else []
        return
    last = _with_devices(make, spec, most)
    if last is None:
        return
    best, fewest = last, fewest + 1
    while last.fits and fewest < most:
        half = (fewest + most) // 2
        now = _with_devices(make, spec, half)
        if now is not None and now.fits:
            best, most = now, half
        else:
            fewest = half + 1
    yield best


def _replicas(make: PlanMaker, spec: PlacementSpec, rows: int) -> Iterator[_Change]:
    """The fewest replicas that fit: on the given devices if these are alike, and on more of them.

    Each has an equal part of the batch, which must have a row for each of its micro-batches.
    """
    given = [device.name for device in spec.devices]
    cut = spec.microbatches if isinstance(spec.microbatches, int) else 1
    alike = len({device.model_copy(update={"name": ""}) for device in spec.devices}) == 1
    if spec.replicas != 1 or spec.space.number > 1:
        return
    for shared in (True, False):
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
            if _peak_if_far(make, wanted) is not None:
                continue
            others = "; ".join(", ".join(row) for row in own_rows[1:])
            change = (
                f'"replicas": {count}'
                + f", and only {', '.join(given[:own])} as devices" * shared
                + ", without 'layers'" * outside
                + f": {'another is' if count == 2 else 'others are'} on {others}, "
                + f"each with 1/{count} of the batch"
            )
            tried = next(_try(change, make, wanted), None)
            if tried is not None and tried.fits:
                yield tried
                break


def _with_devices(make: PlanMaker, spec: PlacementSpec, count: int) -> _Change | None:
    """The change to ``count`` devices in all; the additional ones are like the last."""
    devices = list(spec.devices)
    while len(devices) < count:
        devices.append(_next_device(devices))
    more = count - len(spec.devices)
    added = ", ".join(device.name for device in devices[len(spec.devices) :])
    change = (
        f"add {more} device{'s' * (more > 1)} like {spec.devices[-1].name} ({added})"
        + " and leave out 'layers'" * bool(spec.layers)
    )
    wanted = _updated(spec.with_layers({}).with_devices(devices), replica_devices=())
    return next(_try(change, make, wanted), None)


def _fewest_devices(plan: Plan) -> int:
    """A lower bound on the number of devices: the sum of the plan's peaks over the largest budget."""
    largest = max((d.room for d in plan.devices if d.room is not None), default=0)
    row = plan.devices[: plan.num_devices]
    return -(-sum(device.peak for device in row) // largest) if largest > 0 else 1


def memory_needed(spec: PlacementSpec, make: PlanMaker) -> str:
    """A remedy that gives the memory each device would need, without the spec's layers if that helps."""
    wanted = _updated(spec, objective="memory")
    needed = _memory_needed(wanted, make)
    without = _memory_needed(wanted.with_layers({}), make) if spec.layers else None
    budgets = [device_slot(device, spec).budget or 0 for device in spec.devices]
    if without is not None and without > min(budgets) and without < 0.95 * (needed or math.inf):
        least = format_bytes(without, enough=True)
        return (
            f"devices of {least} (reserve included) each and leave out 'layers', or a smaller input"
        )
    if needed is None:
        return "use a smaller input"
    return f"devices of {format_bytes(needed, enough=True)} (reserve included) each, or a smaller input"


def _memory_needed(spec: PlacementSpec, make: PlanMaker) -> int | None:
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


def _next_device(devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """A device like the last one, with the lowest free index of its type."""
    last = devices[-1]
    kind = last.name.partition(":")[0]
    taken = {device.name for device in devices}
    names = (f"{kind}:{index}" for index in range(1, len(devices) + 2))
    return last.model_copy(update={"name": next(n for n in names if n not in taken)})


def _updated(spec: PlacementSpec, **fields: Any) -> PlacementSpec:
    return spec.model_copy(update=fields)


def _try(change: str, make: PlanMaker, spec: PlacementSpec) -> Iterator[_Change]:
    """The plan of ``spec``: the one that a user would get if it can fit, otherwise that of least memory."""
    made = _plan(make.quick_plan, spec)
    if made is not None and made.fits:
        made = _plan(make, spec)
    if made is not None:
        yield _Change(change, made)


def _plan(make: Callable[[PlacementSpec], Plan], spec: PlacementSpec) -> Plan | None:
    """The result of ``make(spec)``; None if a change that was made contradicts the rest of the spec."""
    try:
        return make(spec)
    except PlacerError:
        return None
