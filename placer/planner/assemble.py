"""Assembles a plan from the stages that were chosen, the spec and the costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from placer.cost import CostTable, Loss
from placer.errors import first_few, some_names
from placer.partition import Partition, PlanningOptions
from placer.plan.summary import describe_loss
from placer.plan.types import DevicePeak, HostPeak, Plan, PlannedLoss, everything_fits
from placer.planner.activation_policy import PolicyChoice
from placer.planner.batch import rows_of_step
from placer.planner.host_memory import estimate_host
from placer.planner.notes import placement_notes
from placer.planner.resolve import shard_state_of
from placer.planner.unknown_times import unknown_kinds, without_times
from placer.program import Program
from placer.quantities import format_seconds
from placer.regions import RegionKey, with_overlap
from placer.spec import PlacementSpec

_NAMED = 3  # layers that a note names


def assemble_plan(
    program: Program,
    spec: PlacementSpec,
    choice: PolicyChoice,
    rows: Sequence[Sequence[str]],
    microbatches: int,
    loss: Loss,
    pins: Mapping[str, str],
) -> Plan:
    """The plan with the stages of ``choice``, on the devices of ``rows`` (one row per replica).

    It has no times if the kind of a device is not known. ``pins`` are the nodes that the spec places.
    """
    costs, partition, options = choice.costs, choice.partition, choice.options
    counted = planned_loss(loss, costs) if spec.training else None
    index_of = {device.name: i for i, device in enumerate(spec.devices)}
    peaks = _device_peaks(partition, rows, index_of, spec)
    used = {slot.name for slot in partition.slots}
    idle = [device.name for device in spec.devices if device.name not in used]
    unknown = unknown_kinds(spec)
    copies = spec.space.number * (len(rows) if options.processes else 1)
    host = _host_peak(choice, spec, options, copies=copies)
    plan = Plan(
        rank_time=partition.seconds,
        fits=everything_fits(peaks, host),
        objective=spec.objective,
        processes=options.processes,
        replicas=len(rows),
        microbatches=microbatches,
        shards=spec.space.number,
        batch=None if spec.batch == "auto" else spec.batch,
        rows=rows_of_step(program, spec),
        schedule=options.schedule,
        precision=spec.precision,
        batch_norm=spec.batch_norm,
        optimizer=options.optimizer,
        training=spec.training,
        batch_dims={**spec.batch_dims, **program.call.said},
        stored=spec.stored,
        step_seconds=partition.seconds,
        optimizer_seconds=partition.optimizer_seconds,
        fingerprint=program.fingerprint,
        rewrites=program.rewrites,
        shard_state=shard_state_of(spec),
        shard_over=None if spec.shard_over == "auto" else spec.shard_over,
        node_layout=options.node_layout,
        compile=spec.compile,
        stages=tuple(
            replace(
                stage,
                devices=tuple(
                    name for row in rows for name in _shards(row, index_of[slot.name], spec)
                ),
                regions=with_overlap(stage.regions) if spec.offload_overlap else stage.regions,
            )
            for stage, slot in zip(partition.stages, partition.slots, strict=True)
        ),
        devices=peaks,
        transfers=partition.transfers,
        checkpoint=_labels(costs.keys, "recompute"),
        offload=_labels(costs.keys, "offload"),
        notes=(
            *([] if counted is None else [describe_loss(counted, partition.slots[-1].name)]),
            *([] if unknown else _policy_notes(spec, choice)),
            *placement_notes(program, spec, options, costs, rows=rows, microbatches=microbatches),
            *_moved_notes(program, partition, pins),
            *([f"Nothing runs on {some_names(idle)}."] if idle else []),
        ),
        optimality=partition.optimality,
        extra_seconds=choice.extra_seconds,
        boundaries=partition.boundaries,
        node_layers=dict(program.layers),
        example_microbatches=(
            options.microbatches if options.microbatches < microbatches else None
        ),
        host=host,
        loss=counted,
    )
    return without_times(plan, spec, partition.slots) if unknown else plan


def planned_loss(loss: Loss, costs: CostTable) -> PlannedLoss:
    """``loss`` as a plan states it, with its bytes in ``costs``."""
    node = costs.nodes[-1]
    return PlannedLoss(
        function=costs.loss,
        target=() if loss.spec is None else loss.spec.target,
        assumed=loss.assumed,
        nbytes=max(node.forward_transient, node.backward_transient),
        whole_batch=loss.whole_batch,
    )


def _moved_notes(program: Program, partition: Partition, pins: Mapping[str, str]) -> list[str]:
    """A note on the operations that are not where ``pins`` has them."""
    moved = {
        name: slot.name
        for slot, names in partition.placed
        for name in names
        if pins.get(name, slot.name) != slot.name
    }
    if not moved:
        return []
    layers = first_few(list(dict.fromkeys(program.layers[name] for name in moved)), _NAMED)
    return [
        f"Operations of {', '.join(layers)} are on {some_names(list(dict.fromkeys(moved.values())))}, not "
        'where "layers" has them: what writes the same memory stays together.'
    ]


def _policy_notes(spec: PlacementSpec, choice: PolicyChoice) -> list[str]:
    """A note on the extra time of the chosen regions."""
    if not choice.extra_seconds:
        return []
    words = [
        w for w, f in (("checkpoint", spec.checkpoint), ("offload", spec.offload)) if f == "auto"
    ]
    return [
        f"{' and '.join(words)} 'auto' adds {format_seconds(choice.extra_seconds)} per micro-batch, "
        "all stages together."
    ]


def _labels(keys: Sequence[RegionKey | None], policy: str) -> tuple[str, ...]:
    """The labels of the regions that are recomputed (or offloaded), in program order."""
    chosen = (key.label for key in keys if key is not None and getattr(key, policy))
    return tuple(dict.fromkeys(chosen))


def _shards(row: Sequence[str], index: int, spec: PlacementSpec) -> Sequence[str]:
    """The devices of the shards of the stage device number ``index`` in a replica's ``row``."""
    shards = spec.space.number
    return row[index * shards : (index + 1) * shards]


def _device_peaks(
    partition: Partition,
    rows: Sequence[Sequence[str]],
    index_of: Mapping[str, int],
    spec: PlacementSpec,
) -> tuple[DevicePeak, ...]:
    slots = {slot.name: slot for slot in partition.slots}
    peaks = []
    for number, row in enumerate(rows):
        table = partition.peaks if number == 0 else partition.replica_peaks
        for name, peak in table.items():
            slot = slots[name]
            peaks += [
                DevicePeak(
                    device=device,
                    peak=peak,
                    budget=slot.budget,
                    reserve=slot.reserve,
                    context=slot.context,
                    allocator=slot.allocator,
                )
                for device in _shards(row, index_of[name], spec)
            ]
    return tuple(peaks)


def _host_peak(
    choice: PolicyChoice, spec: PlacementSpec, options: PlanningOptions, copies: int
) -> HostPeak | None:
    """The host memory of ``copies`` replicas together; None if nothing is offloaded."""
    if not any(key is not None and key.offload for key in choice.costs.keys):
        return None
    usage = estimate_host(choice.costs, choice.partition, options)
    return HostPeak(
        peak=copies * usage.peak, reserved=copies * usage.reserved, budget=spec.host_memory
    )
