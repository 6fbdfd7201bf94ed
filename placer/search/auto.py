"""Chooses a spec: the best strategy for the given devices, with the plan and what else was tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from placer.errors import BudgetError, PlacerError, SpecError, Tried
from placer.plan.check import describe_overflow, host_error
from placer.plan.types import Plan
from placer.planner.devices import device_slot, with_all_devices, with_known_memory
from placer.planner.resolve import check_shard_over
from placer.planner.unknown_times import ask_for_kind, unknown_kinds
from placer.quantities import format_count
from placer.search.answer import with_alternatives
from placer.search.remedies import (
    as_tried,
    find_largest_node,
    lacks_room,
    memory_needed,
    more_like,
)
from placer.search.search import Found, Rated, find_strategy
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec
from placer.spec.space import InputSplit

_BY_TIME = ("throughput", "latency", "bottleneck")
_MOST_DEVICES = 16  # that are tried where the given ones do not suffice
_NAMED = 3  # of the devices that would be added


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The spec that was chosen, and its plan, which has the alternatives."""

    spec: PlacementSpec
    plan: Plan


def plan_of(wanted: PlacementSpec, make: JudgingPlanner) -> Plan:
    """The plan for ``wanted``; that of the best strategy if it names a machine, and no number of stages.

    Raises what `choose_spec` raises.
    """
    if wanted.machine is not None and wanted.stages == "auto":
        return choose_spec(wanted, make).plan
    return make(wanted)


def choose_spec(wanted: PlacementSpec, make: JudgingPlanner) -> Answer:
    """The best strategy for the devices of ``wanted``, all of which may be used, as a spec.

    What ``wanted`` gives stays as it is. Layers are written into the spec where they suffice to give the plan
    again. CPU devices without a given memory share the memory of this machine. Raises ``SpecError`` if the
    memory of a device is not known, or its kind where time decides, and ``BudgetError`` if nothing fits, with
    what was tried.
    """
    wanted = with_known_devices(wanted)
    found = find_strategy(wanted, make)
    if found.best is None:
        raise _misfit(wanted, make, found)
    return answer_of(found, make, len(wanted.devices))


def with_known_devices(wanted: PlacementSpec) -> PlacementSpec:
    """``wanted`` with the memory of all its devices. Raises ``SpecError`` as `choose_spec` does.

    It needs no model, so it can be asked before one is recorded.
    """
    known = with_known_memory(with_all_devices(wanted), "which strategies fit")
    _check_kinds_known(known)
    if "replicas" in wanted.model_fields_set and wanted.replicas != "auto":
        check_shard_over(wanted, wanted.replicas)
    return known


def answer_of(found: Found, make: JudgingPlanner, devices: int) -> Answer:
    """The spec and the plan of the best strategy that was found on so many ``devices``; there is one."""
    assert found.best is not None and found.best.plan is not None
    plan = found.best.plan
    over = "auto" if plan.shard_state == "none" else plan.shard_over or "auto"
    spec = found.best.spec
    marked = {  # by `placer.Whole` and `placer.Batched` in the example
        name: "whole" if dim is None else InputSplit(batch_dim=dim)
        for name, dim in make.program.call.said.items()
        if name not in spec.inputs
    }
    layout = {"node_layout": plan.node_layout, "shard_over": over}
    spec = spec.model_copy(update={**layout, "inputs": {**spec.inputs, **marked}})
    spec, plan = with_resolved_layers(spec, found.best.plan, make)
    if mixing := make.program.captured.mixing:
        plan = replace(plan, notes=(*plan.notes, f"The batch is not split. {mixing}."))
    return Answer(spec=spec, plan=with_alternatives(plan, found, devices))


def _check_kinds_known(wanted: PlacementSpec) -> None:
    """Raise ``SpecError`` where time decides, and only the kinds of the devices can tell it."""
    unknown = unknown_kinds(wanted)
    if wanted.objective not in _BY_TIME or not unknown:
        return
    slots = [device_slot(device, wanted) for device in wanted.devices]
    index = [d.name for d in wanted.devices].index(unknown[0])
    problem = f"the kind of {', '.join(unknown)} is not given, and the fastest way depends on it"
    remedy = (
        f'{ask_for_kind(wanted, slots)}; or look for the fewest devices ("objective": "devices")'
    )
    raise SpecError(SpecError.UNNAMED, [(f"/devices/{index}/kind", problem, remedy)])


def with_resolved_layers(
    spec: PlacementSpec, plan: Plan, make: JudgingPlanner
) -> tuple[PlacementSpec, Plan]:
    """``spec`` with the layers placed as in ``plan``, and its plan, if that is no worse than ``plan``.

    Layers are coarser than nodes, so the position of a boundary inside a layer is left to the compiler. If
    the new plan does not fit, has a higher peak, starves more kernels, or takes longer where time is
    minimised, the result is ``spec`` and ``plan`` as they are.
    """
    if spec.machine is not None:
        return spec, plan  # its devices are not named
    resolved = spec.with_layers({**spec.layers, **whole_layers(plan)})
    again = make(resolved)
    if again.stages == plan.stages:
        # The boundaries were chosen before layers were written into the spec.
        again = replace(again, boundaries=plan.boundaries, optimality=plan.optimality)
    slower = spec.objective != "memory" and again.rank_time > plan.rank_time * (1 + 1e-6)
    worse = again.peak > plan.peak or slower or again.starved > plan.starved
    return (resolved, again) if again.fits and not worse else (spec, plan)


def whole_layers(plan: Plan) -> dict[str, str]:
    """The outermost modules whose nodes are all on one device, with that device, in program order."""
    device_of = {node: stage.devices[0] for stage in plan.stages for node in stage.nodes}
    devices: dict[str, set[str]] = {}
    for node, layer in plan.node_layers.items():
        while layer:
            devices.setdefault(layer, set()).add(device_of[node])
            layer = layer.rpartition(".")[0]
    uniform = {layer for layer, found in devices.items() if len(found) == 1}
    return {
        layer: next(iter(devices[layer]))
        for layer in devices
        if layer in uniform and layer.rpartition(".")[0] not in uniform
    }


def _misfit(wanted: PlacementSpec, make: JudgingPlanner, found: Found) -> BudgetError:
    """The error that says that nothing fits, with what was tried and how many more devices would do."""
    nearest = found.nearest
    if nearest is not None and nearest.plan is not None and nearest.plan.fits_devices:
        return host_error(nearest.plan)
    devices = format_count(len(wanted.devices), "device")
    largest = find_largest_node(wanted, make)
    tried = [_tried(rated) for rated in (*found.others, *found.unfit)]
    where, problem, device, missing = f"device {wanted.devices[0].name}", "", "", 0
    if nearest is not None and (plan := nearest.plan) is not None:
        device, missing = plan.tightest.device, plan.overflow_bytes
        where = f"device {device}"
        name = nearest.strategy.describe()
        problem = f"the nearest, {name}, needs {describe_overflow(plan.tightest)}; "
    remedy = needed = lacks_room(wanted)
    if not remedy:
        offloaded = _offloading(nearest, make)
        make.purpose = "with more devices"
        more = _more_devices(wanted, make)
        make.purpose = ""
        fitting = [each for each in (*offloaded, *more) if each.fits]
        fitting.sort(key=lambda each: each.step_seconds or 0.0)
        tried = [*fitting, *tried, *(each for each in more if not each.fits)]
        needed = "" if nearest is None else memory_needed(nearest.spec, make)
        remedy = "; or ".join(filter(None, (*(each.change for each in fitting), needed)))
    return BudgetError(
        where,
        f"no strategy for {devices} fits: {problem}{largest.describe()}",
        remedy,
        device=device,
        missing_bytes=missing,
        largest_node=largest.node,
        largest_node_bytes=largest.nbytes,
        tried=tried,
        needed=needed,
    )


def _tried(rated: Rated) -> Tried:
    name = rated.strategy.describe()
    if rated.plan is not None:
        return as_tried(name, rated.plan)
    return Tried(change=name, fits=rated.fits, peak=rated.peak)


def _more_devices(wanted: PlacementSpec, make: JudgingPlanner) -> list[Tried]:
    """The fewest devices like the last one, twice as many at a time, with which something fits.

    Where nothing does, the most that were tried. Unless they are asked for, there are no chunks: a dry run
    with them takes many times as long, and devices help more.
    """
    devices, short = list(wanted.devices), list[Tried]()
    if "chunks" not in wanted.model_fields_set:
        wanted = wanted.model_copy(update={"chunks": 1})
    while wanted.machine is None and not wanted.layers and 2 * len(devices) <= _MOST_DEVICES:
        devices += more_like(devices, len(devices))
        found = find_strategy(wanted.with_devices(devices), make, any_will_do=True)
        like = f"{len(devices)} devices like {wanted.devices[-1].name}"
        if found.best is not None and (plan := found.best.plan) is not None:
            added = [device.name for device in devices[len(wanted.devices) :]]
            names = ", ".join(added[:_NAMED]) + " …" * (len(added) > _NAMED)
            change = f"give {like} (with {names}): {found.best.strategy.describe()}"
            return [as_tried(change, plan)]
        least = min(map(_tried, (*found.others, *found.unfit)), key=lambda each: each.peak)
        short = [replace(least, change=f"{like}: {least.change}")]
    return short


def _offloading(nearest: Rated | None, make: JudgingPlanner) -> list[Tried]:
    """What nearly fits, with activations kept in host memory, as a plan of little memory."""
    if nearest is None or nearest.spec.offload or not nearest.spec.training:
        return []
    try:
        plan = make.judge(make.quick_plan(nearest.spec.model_copy(update={"offload": "auto"})))
    except PlacerError:
        return []
    change = (
        f'"offload": "auto" (activations are kept in host memory): {nearest.strategy.describe()}'
    )
    return [as_tried(change, plan)] if plan.fits else []
