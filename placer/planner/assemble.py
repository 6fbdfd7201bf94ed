"""A plan put together: the stages that were chosen, with what the spec and the costs say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from placer.cost import CostTable
from placer.partition import Partition, PlanningOptions
from placer.plan.types import DevicePeak, HostPeak, Optimality, Plan, Transfer
from placer.planner.activation_policy import PolicyChoice
from placer.planner.notes import placement_notes
from placer.program import Program
from placer.regions import RegionKey, with_overlap
from placer.spec import PlacementSpec
from placer.units import format_seconds


def assemble_plan(
    program: Program,
    spec: PlacementSpec,
    light: PolicyChoice,
    options: PlanningOptions,
    rows: Sequence[Sequence[str]],
    microbatches: int,
) -> Plan:
    """The plan that has the stages of ``light``, on the devices of ``rows`` (one row per replica)."""
    costs, partition = light.costs, light.partition
    index_of = {device.name: i for i, device in enumerate(spec.devices)}
    peaks = _device_peaks(partition, rows, index_of)
    host = _host_peak(costs, spec, copies=len(rows) * microbatches)
    return Plan(
        fits=all(peak.fits for peak in peaks) and (host is None or host.fits),
        objective=spec.objective,
        processes=options.processes,
        replicas=len(rows),
        microbatches=microbatches,
        schedule=spec.schedule,
        precision=spec.precision,
        batch_norm=spec.batch_norm,
        optimizer=options.optimizer,
        training=spec.training,
        step_seconds=partition.seconds,
        optimizer_seconds=partition.optimizer_seconds,
        fingerprint=program.fingerprint,
        stages=tuple(
            replace(
                stage,
                devices=tuple(row[index_of[slot.name]] for row in rows),
                regions=with_overlap(stage.regions) if spec.offload_overlap else stage.regions,
            )
            for stage, slot in zip(partition.stages, partition.slots, strict=True)
        ),
        devices=peaks,
        transfers=_transfers(program, costs, partition),
        checkpoint=_labels(costs.keys, "recompute"),
        offload=_labels(costs.keys, "offload"),
        notes=(
            *_light_notes(spec, light),
            *placement_notes(program, spec, options, replicas=len(rows), microbatches=microbatches),
        ),
        optimality=partition.optimality,
        extra_time=_extra_time(light),
        boundaries=partition.boundaries,
        node_layers=dict(program.layer_of),
        example_microbatches=(
            options.microbatches if options.microbatches < microbatches else None
        ),
        host=host,
    )


def _light_notes(spec: PlacementSpec, light: PolicyChoice) -> list[str]:
    """What the regions that the compiler chose cost, and how much less it could be."""
    if not light.extra_seconds:
        return []
    words = [
        w for w, f in (("checkpoint", spec.checkpoint), ("offload", spec.offload)) if f == "auto"
    ]
    least = format_seconds(light.least_seconds)
    known = _extra_time(light)
    if known is None or known.proven:
        bound = ", which is the least possible for these stages"
    else:
        bound = f"; no choice for these stages adds less than {least}, {known.gap:.1%} less"
    if not light.least_seconds:
        bound = "; how little it could be is not known"
    return [
        f"{' and '.join(words)} 'auto' adds {format_seconds(light.extra_seconds)} per micro-batch, "
        f"all stages together{bound}."
    ]


def _extra_time(light: PolicyChoice) -> Optimality | None:
    if not light.extra_seconds:
        return None
    return Optimality(
        criterion="extra seconds of a micro-batch, recomputing and offloading",
        value=light.extra_seconds,
        lower_bound=min(light.least_seconds, light.extra_seconds),
    )


def _labels(keys: Sequence[RegionKey | None], policy: str) -> tuple[str, ...]:
    """The layers that are recomputed, or offloaded, in program order."""
    chosen = (key.label for key in keys if key is not None and getattr(key, policy))
    return tuple(dict.fromkeys(chosen))


def _device_peaks(
    partition: Partition, rows: Sequence[Sequence[str]], index_of: Mapping[str, int]
) -> tuple[DevicePeak, ...]:
    slots = {slot.name: slot for slot in partition.slots}
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
                    reserve=slot.reserve - slot.context if slot.budget is not None else 0,
                    context=slot.context,
                    allocator=slot.allocator,
                )
            )
    return tuple(peaks)


def _host_peak(costs: CostTable, spec: PlacementSpec, copies: int) -> HostPeak | None:
    """What waits on the host if so many micro-batches do at once; None where nothing is offloaded."""
    if not any(key is not None and key.offload for key in costs.keys):
        return None
    nbytes = copies * sum(node.host_nbytes for node in costs.nodes)
    return HostPeak(peak=nbytes, reserved=None, budget=spec.host_memory)


def _transfers(program: Program, costs: CostTable, partition: Partition) -> tuple[Transfer, ...]:
    stage_of = {name: s for s, stage in enumerate(partition.stages) for name in stage.nodes}
    last = len(partition.stages) - 1
    found = []
    for node, readers in enumerate(costs.readers):
        name = program.order[node]
        source = stage_of[name]
        targets = {stage_of[program.order[r]] if r < len(program.order) else last for r in readers}
        found += [
            Transfer(
                value=name, source=source, target=target, nbytes=costs.nodes[node].output_nbytes
            )
            for target in sorted(targets - {source})
        ]
    return tuple(found)
