"""Build a plan: what the spec asks for, resolved against a captured model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from placer.capture import Capture
from placer.cost import CostTable, device_type, estimate_costs
from placer.errors import PlacerError, SpecError
from placer.partition import Demands, DeviceSlot, Partition, choose_partition
from placer.partition.labels import Treatment
from placer.plan.devices import device_slot, likely_kernels, memory_uses, with_known_memory
from placer.plan.lighten import LightPlan, lighten
from placer.plan.notes import placement_notes, shared_modules
from placer.plan.types import DevicePeak, Optimality, Plan, StagePlan, Transfer
from placer.regions import RegionKey, find_regions, region_keys
from placer.schedule import batch_cuts
from placer.spec import PlacementSpec, resolve_layers, resolve_patterns
from placer.units import format_seconds

_MOST_MICROBATCHES = 32  # "auto" tries powers of two up to this


def build_plan(
    capture: Capture,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    *,
    pins: Mapping[str, str] | None = None,
    costs: CostTable | None = None,
    processes: bool = False,
) -> Plan:
    """The plan for ``capture`` under ``spec``, for a batch shaped like ``inputs`` (any device).

    ``pins`` are nodes and the devices they must be on, beyond what the spec's layers say; ``costs``
    those of the spec's micro-batch, where they are known already. ``processes``: the plan is for one
    process per device, where values pass through the stages between. A plan
    that overflows a budget is returned with ``fits`` False. Raises ``SpecError`` when the spec's
    layers or devices do not go with the model, ``PlacerError`` for what is not supported.
    """
    _check_supported(spec)
    for use in memory_uses(spec):
        spec = with_known_memory(spec, use)
    pins = {**_pins(capture, spec), **(pins or {})}
    slots = [device_slot(device, spec) for device in spec.devices]
    replicas = _replicas(spec)
    rows = spec.device_rows(replicas)
    keys = _region_keys(capture, spec)
    treatments = _treatments(spec)
    types = {device_type(device.name) for device in spec.devices}
    plans = []
    for microbatches in _microbatch_choices(spec, capture, replicas):
        costs_of = partial(
            estimate_costs,
            capture,
            microbatch_inputs(capture, inputs, replicas, microbatches),
            training=spec.training,
            precision=spec.precision,
            offloads=bool(spec.offload),
        )
        sizes = _microbatch_rows(capture, inputs, replicas, microbatches)
        demands = Demands(
            objective=spec.objective,
            schedule=spec.schedule,
            microbatches=len(sizes),
            last_share=sizes[-1] / max(sizes[0], 1),
            optimizer=_optimizer(spec),
            training=spec.training,
            half=spec.precision != "fp32",
            processes=processes,
        )
        found = costs or costs_of(kernels=likely_kernels(spec))
        choose = partial(_choose, capture, slots, pins, demands)
        light = lighten(capture, found, keys, treatments, slots, demands, choose)
        if costs is None and len(types) > 1:  # where each node runs is known: with its own kernels
            stages = light.partition.stages
            placed = {node: stage.device.name for stage in stages for node in stage.nodes}
            found = costs_of(kernels={node: device_type(name) for node, name in placed.items()})
            choose = partial(_choose, capture, slots, placed, demands)
            light = lighten(capture, found, keys, treatments, slots, demands, choose)
        plans.append(_plan(capture, spec, light, demands, rows, microbatches))
    return min(plans, key=lambda plan: (not plan.fits, _overflow(plan), plan.step_seconds))


def _choose(
    capture: Capture,
    slots: Sequence[DeviceSlot],
    pins: Mapping[str, str],
    demands: Demands,
    costs: CostTable,
    more_pins: Mapping[str, str],
) -> Partition:
    return choose_partition(capture, costs, slots, {**more_pins, **pins}, demands)


def _treatments(spec: PlacementSpec) -> tuple[Treatment, ...]:
    """What the compiler may do with the saved activations of any node."""
    recompute, offload = spec.checkpoint == "auto", spec.offload == "auto"
    if not spec.training:
        return ()
    found = [Treatment(recompute=True)] * recompute + [Treatment(offload=True)] * offload
    return (*found, *[Treatment(recompute=True, offload=True)] * (recompute and offload))


def microbatch_inputs(
    capture: Capture, inputs: Sequence[Tensor], replicas: int, microbatches: int
) -> list[Tensor]:
    """The inputs of the largest micro-batch, as tensors without data."""
    rows = _microbatch_rows(capture, inputs, replicas, microbatches)[0]
    shaped = []
    for tensor, batched in zip(inputs, capture.call.batched, strict=True):
        shape = list(tensor.shape)
        if batched:
            shape[0] = rows
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        shaped.append(meta.requires_grad_(tensor.requires_grad))
    return shaped


def _microbatch_rows(
    capture: Capture, inputs: Sequence[Tensor], replicas: int, microbatches: int
) -> tuple[int, ...]:
    """Rows of each micro-batch of the first replica; one micro-batch where no input has a batch."""
    sizes = (t.size(0) for t, b in zip(inputs, capture.call.batched, strict=True) if b)
    return batch_cuts(next(sizes, 1), replicas, microbatches)[0]


def _check_supported(spec: PlacementSpec) -> None:
    if spec.batch_norm == "sync" and spec.microbatches != 1:
        raise PlacerError(
            "/batch_norm",
            "'sync' takes statistics over the whole batch, which micro-batches cannot wait for",
            "use \"microbatches\": 1, or 'per_microbatch'",
        )
    if spec.batch_norm == "deferred":
        raise PlacerError(
            "/batch_norm", f"{spec.batch_norm!r} is not available yet", "use 'per_microbatch'"
        )


def _region_keys(capture: Capture, spec: PlacementSpec) -> tuple[RegionKey | None, ...]:
    """Per node what the spec's patterns say of its saved activations; nothing where none are made."""
    paths = [name for name, _ in capture.model.named_modules(remove_duplicate=False)]
    chosen, problems = {}, []
    for field, patterns in (("checkpoint", spec.checkpoint), ("offload", spec.offload)):
        found, unmatched = resolve_patterns(field, () if patterns == "auto" else patterns, paths)
        chosen[field] = found if spec.training else set()
        problems += unmatched
    if problems:
        raise SpecError("placement spec", problems)
    return region_keys(capture, chosen["checkpoint"], chosen["offload"])


def _pins(capture: Capture, spec: PlacementSpec) -> dict[str, str]:
    """Node -> device for every node whose layer the spec places."""
    paths = [name for name, _ in capture.model.named_modules(remove_duplicate=False)]
    placed, problems = resolve_layers(spec.layers, paths)
    if problems:
        raise SpecError(SpecError.UNNAMED, problems)
    for names in shared_modules(capture.model):  # nodes know the first name only
        asked = [placed[name] for name in names if name in placed]
        if asked:
            placed.setdefault(names[0], asked[0])
    return {node: placed[layer] for node, layer in capture.layer_of.items() if layer in placed}


def _replicas(spec: PlacementSpec) -> int:
    if spec.replicas != "auto":
        return int(spec.replicas)
    if spec.replica_devices:
        return 1 + len(spec.replica_devices)
    if spec.devices[0].name.startswith("cuda") and torch.cuda.is_available():
        return max(1, torch.cuda.device_count() // len(spec.devices))
    return 1


def _microbatch_choices(spec: PlacementSpec, capture: Capture, replicas: int) -> list[int]:
    if spec.microbatches != "auto":
        return [int(spec.microbatches)]
    rows = -(-(capture.call.batch_size or 1) // replicas)
    return [m for m in (2**i for i in range(6)) if m <= min(rows, _MOST_MICROBATCHES)]


def _optimizer(spec: PlacementSpec) -> str | Mapping[str, int]:
    if isinstance(spec.optimizer, str):
        return spec.optimizer
    return {"bytes_per_parameter": spec.optimizer.bytes_per_parameter}


def _overflow(plan: Plan) -> int:
    return max((-(device.headroom or 0) for device in plan.devices), default=0) * (not plan.fits)


def _plan(
    capture: Capture,
    spec: PlacementSpec,
    light: LightPlan,
    demands: Demands,
    rows: Sequence[Sequence[str]],
    microbatches: int,
) -> Plan:
    costs, partition = light.costs, light.partition
    index_of = {device.name: i for i, device in enumerate(spec.devices)}
    key_of = dict(zip(costs.names, costs.keys, strict=True)) if costs.keys else {}
    stages = []
    for index, stage in enumerate(partition.stages):
        column = index_of[stage.device.name]
        layers = dict.fromkeys(capture.layer_of[node] for node in stage.nodes)
        stages.append(
            StagePlan(
                index=index,
                devices=tuple(row[column] for row in rows),
                layers=tuple(layer for layer in layers if layer),
                nodes=stage.nodes,
                memory=stage.memory,
                budget=stage.device.budget,
                reserve=stage.device.reserve,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                regions=find_regions(stage.nodes, key_of),
            )
        )
    peaks = _device_peaks(partition, rows, index_of)
    return Plan(
        fits=all(peak.fits for peak in peaks),
        objective=spec.objective,
        processes=demands.processes,
        replicas=len(rows),
        microbatches=microbatches,
        schedule=spec.schedule,
        precision=spec.precision,
        batch_norm=spec.batch_norm,
        optimizer=demands.optimizer,
        training=spec.training,
        step_seconds=partition.seconds,
        fingerprint=capture.fingerprint,
        stages=tuple(stages),
        devices=peaks,
        transfers=_transfers(capture, costs, partition),
        checkpoint=_labels(costs.keys, "recompute"),
        offload=_labels(costs.keys, "offload"),
        notes=(
            *_light_notes(spec, light),
            *placement_notes(capture, spec, demands, replicas=len(rows), microbatches=microbatches),
        ),
        optimality=partition.optimality,
        extra_time=_extra_time(light),
        boundaries=partition.boundaries,
        node_layers=dict(capture.layer_of),
    )


def _light_notes(spec: PlacementSpec, light: LightPlan) -> list[str]:
    """What the regions that the compiler chose cost, and how much less it could be."""
    if not light.extra_seconds:
        return []
    words = [
        w for w, f in (("checkpoint", spec.checkpoint), ("offload", spec.offload)) if f == "auto"
    ]
    least = format_seconds(light.least_seconds)
    known = _extra_time(light)
    gap = "none, it is the least" if known is None or known.proven else f"{known.gap:.1%}"
    bound = f"no choice for these stages adds less than {least} (gap: {gap})"
    if not light.least_seconds:
        bound = "how little it could be is not known"
    return [
        f"{' and '.join(words)} 'auto' adds {format_seconds(light.extra_seconds)} per micro-batch, "
        f"all stages together; {bound}."
    ]


def _extra_time(light: LightPlan) -> Optimality | None:
    if not light.extra_seconds:
        return None
    return Optimality(
        criterion="extra seconds of a micro-batch, recomputing and offloading",
        value=light.extra_seconds,
        lower_bound=min(light.least_seconds, light.extra_seconds),
    )


def _labels(keys: Sequence[RegionKey | None], treatment: str) -> tuple[str, ...]:
    """The layers that are recomputed, or offloaded, in program order."""
    chosen = (key.label for key in keys if key is not None and getattr(key, treatment))
    return tuple(dict.fromkeys(chosen))


def _device_peaks(
    partition: Partition, rows: Sequence[Sequence[str]], index_of: Mapping[str, int]
) -> tuple[DevicePeak, ...]:
    slots = {stage.device.name: stage.device for stage in partition.stages}
    peaks = []
    for number, row in enumerate(rows):
        table = partition.peaks if number == 0 else partition.replica_peaks
        for name, peak in table.items():
            slot = slots[name]
            peaks.append(
                DevicePeak(
                    device=row[index_of[name]],
                    peak=peak,
                    budget=slot.budget,
                    reserve=slot.reserve,
                )
            )
    return tuple(peaks)


def _transfers(capture: Capture, costs: CostTable, partition: Partition) -> tuple[Transfer, ...]:
    stage_of = {name: s for s, stage in enumerate(partition.stages) for name in stage.nodes}
    last = len(partition.stages) - 1
    found = []
    for node, readers in enumerate(costs.readers):
        name = capture.order[node]
        source = stage_of[name]
        targets = {stage_of[capture.order[r]] if r < len(capture.order) else last for r in readers}
        found += [
            Transfer(
                value=name, source=source, target=target, nbytes=costs.nodes[node].output_nbytes
            )
            for target in sorted(targets - {source})
        ]
    return tuple(found)


__all__ = ["build_plan", "microbatch_inputs"]
