"""Chooses a spec with the fewest of the given devices on which the model fits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from placer.errors import SpecError
from placer.plan.types import Plan
from placer.planner.build import PlanMaker
from placer.planner.devices import device_slot, with_known_memory
from placer.planner.remedies import misfit_error
from placer.planner.unknown_times import ask_for_kind, unknown_kinds
from placer.program import Program
from placer.quantities import format_count, format_seconds
from placer.spec import PlacementSpec

_FASTER = 1.01  # a step that is longer by less than this factor is as fast


def choose_spec(
    program: Program,
    wanted: PlacementSpec,
    inputs: Sequence[Tensor],
    make: PlanMaker,
) -> PlacementSpec:
    """``wanted`` with its layers resolved, on the shortest prefix of its devices that suffices.

    A prefix suffices if the model fits and no kernel is starved of its workspace; if there is none, the
    first on which it fits does. To minimise time, the step must also be as short as on other prefixes, but
    for a percent: more devices are not always faster. ``make`` plans a spec for ``program`` and ``inputs``.
    Devices named in ``wanted.layers`` are always used. CPU devices without a given memory share the memory of
    this machine. Raises ``SpecError`` if the memory of a device is not known, or its kind where time decides,
    and ``BudgetError`` if no placement fits, with the fullest device of the closest placement, the missing
    bytes, and the changes that were tried.
    """
    wanted = with_known_memory(wanted, "how few devices suffice")
    _check_kinds_known(wanted)
    specs = [wanted.with_devices(wanted.devices[:count]) for count in _counts(wanted)]
    plans: list[tuple[PlacementSpec, Plan]] = []
    for spec in specs:
        plans.append((spec, make(spec)))
        if wanted.objective == "memory" and plans[-1][1].fits and not plans[-1][1].starved:
            break
    fitting = [(spec, plan) for spec, plan in plans if plan.fits]
    good = [(spec, plan) for spec, plan in fitting if not plan.starved] or fitting
    if good:
        fast = _FASTER * min(plan.rank_time for _, plan in good)
        spec, plan = next(
            (spec, plan)
            for spec, plan in good
            if wanted.objective == "memory" or plan.rank_time <= fast
        )
        return _with_resolved_layers(spec, plan, make)
    closest = min((plan for _, plan in plans), key=lambda plan: plan.overflow_bytes)
    error = misfit_error(program, wanted, inputs, closest, make)
    devices = format_count(len(wanted.devices), "device")
    error.problem = f"no placement on {devices} fits: {error.problem}"
    raise error


def faster_with_fewer(spec: PlacementSpec, plan: Plan, make: PlanMaker) -> str:
    """A sentence: with fewer of its devices, ``plan`` for ``spec`` would be faster; "" if it would not.

    Nothing is said of plans that do not fit or may not, or were not chosen by time.
    """
    known = plan.fits and all(device.budget is not None for device in plan.devices)
    if not known or spec.objective == "memory" or spec.replica_devices:
        return ""
    specs = [spec.with_devices(spec.devices[:count]) for count in _counts(spec)[:-1]]
    made = [make.estimate(fewer) for fewer in specs]
    fast = [p for p in made if p.fits and p.rank_time * _FASTER < plan.rank_time]
    for fewer in sorted(fast, key=lambda plan: plan.rank_time):
        judged = make.judge(fewer)
        if not judged.fits or judged.starved:
            continue
        names = ", ".join(dict.fromkeys(stage.devices[0] for stage in fewer.stages))
        said = f"with {names} alone, a step would take"
        if fewer.step_seconds is None or plan.step_seconds is None:
            return f"Fewer devices would be faster by reference rates: {said} less time."
        before, now = (format_seconds(p.step_seconds or 0.0) for p in (plan, fewer))
        return f"Fewer devices would be faster: {said} {now} instead of {before}."
    return ""


def _counts(spec: PlacementSpec) -> list[int]:
    """The numbers of devices, from the first on, that hold all devices which the spec's layers name.

    Stages that are split in space have several devices each.
    """
    pinned = set(spec.layers.values())
    least = max((i for i, d in enumerate(spec.devices, 1) if d.name in pinned), default=1)
    counts = range(least, len(spec.devices) + 1)
    return [count for count in counts if count % spec.space.number == 0]


def _check_kinds_known(wanted: PlacementSpec) -> None:
    """Raise ``SpecError`` where ``wanted`` leaves to time what only the kinds of its devices can tell."""
    by_time = ['"microbatches": "auto"'] * (wanted.microbatches == "auto")
    by_time += [f'"objective": "{wanted.objective}"'] * (
        wanted.objective != "memory" and len(wanted.devices) > 1
    )
    if not by_time or not unknown_kinds(wanted):
        return
    slots = [device_slot(device, wanted) for device in wanted.devices]
    index = [d.name for d in wanted.devices].index(unknown_kinds(wanted)[0])
    problem = (
        f"the kind of {', '.join(unknown_kinds(wanted))} is not given, so their times are not known, "
        f"and {' and '.join(by_time)} depends on them"
    )
    raise SpecError(
        SpecError.UNNAMED, [(f"/devices/{index}/kind", problem, ask_for_kind(wanted, slots))]
    )


def _with_resolved_layers(spec: PlacementSpec, plan: Plan, make: PlanMaker) -> PlacementSpec:
    """``spec`` with the layers placed as in ``plan``, if planning it again gives a plan that is no worse.

    Layers are coarser than nodes, so the position of a boundary inside a layer is left to the compiler. If
    the new plan does not fit, has a higher peak, starves more kernels, or takes longer where time is
    minimised, the result is ``spec`` itself, which gives ``plan`` again.
    """
    if spec.space.shards == "auto":
        space = spec.space.model_copy(update={"shards": plan.shards})
        spec = spec.model_copy(update={"space": space})
    resolved = spec.with_layers({**spec.layers, **whole_layers(plan)})
    again = make(resolved)
    higher = max(d.peak for d in again.devices) > max(d.peak for d in plan.devices)
    slower = spec.objective != "memory" and again.rank_time > plan.rank_time * (1 + 1e-6)
    worse = higher or slower or again.starved > plan.starved
    return resolved if again.fits and not worse else spec


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
