"""Describes chosen stages for a plan: their seconds, peaks, transfers, and the boundaries between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.machine.catalogue import DeviceKind
from placer.machine.devices import device_type
from placer.partition.candidate import (
    Candidate,
    StageCosts,
    boundary_alternatives,
    copies_overlap,
    in_flight_at,
    optimizer_on,
    peak_share,
    reference_bytes,
    update_seconds,
)
from placer.partition.noncontiguous import device_peaks, may_be_noncontiguous
from placer.partition.stage_cost.optimizer import OptimizerMemory
from placer.partition.stage_cost.overlap import overlapped_backward, overlapped_forward
from placer.partition.stage_cost.score import (
    launch_seconds,
    peak_bytes,
    replica_peak_bytes,
    saved_bytes,
    stage_seconds,
    transfer_seconds,
)
from placer.partition.stage_cost.tables import IntervalTables
from placer.partition.steps import StepClock, other_places, step_seconds
from placer.partition.types import MANY_STAGES, DeviceSlot, Partition, PlanningOptions
from placer.plan.types import Boundary, Optimality, StageMemory, StagePlan, Transfer
from placer.program import Program
from placer.regions import find_regions
from placer.schedule import InFlight

STEP_SECONDS = "seconds of a step"
SLOWEST_SECONDS = "seconds of the slowest stage"
TOTAL_SECONDS = "seconds of all stages"
PEAK_BYTES = "largest estimated peak, bytes"
PEAK_SHARE = "largest estimated peak, share of its budget"


class _Used(NamedTuple):
    """A stage that is not empty: the index of its device, and of the first and last interval of its cuts."""

    slot: int
    first: int
    last: int


def describe_partition(
    best: Candidate,
    program: Program,
    costs: CostTable,
    pinned: Sequence[str | None],
    options: PlanningOptions,
    bound: float,
) -> Partition:
    """The partition of ``best``.

    ``pinned`` has for each node of its order the device that it is pinned to, or None. ``bound`` is a lower
    bound on the criterion that was minimised, in seconds or in the unit of `Candidate.peak`.
    """
    spans = enumerate(itertools.pairwise(best.cuts))
    used = [_Used(q, x, y - 1) for q, (x, y) in spans if y > x]
    slots = [best.slots[q] for q, _, _ in used]
    received_from = _received_from(best, used, costs)
    stages = _stages(best, used, program, costs, options, received_from)
    peaks, replica_peaks = _device_peaks(best, used, stages, costs, options, received_from)
    fits = all(slot.fits(peaks[slot.name]) for slot in slots)
    transfers = _find_transfers(program, costs, stages, slots, options)
    optimizer = _optimizer_seconds(best, used, options)
    seconds = step_seconds(stages, transfers, options, optimizer, replicas=options.replicas)
    loads = [
        (stage.forward_seconds or 0.0)
        + (stage.backward_seconds or 0.0)
        + float(transfer_seconds(best.tables, slot.kind, training=options.training)[x, y])
        for stage, slot, (_, x, y) in zip(stages, slots, used, strict=True)
    ]
    criterion = _criterion(best, options)
    if criterion not in (TOTAL_SECONDS, STEP_SECONDS):
        busy = dict.fromkeys(peaks, 0.0)
        for slot, load in zip(slots, loads, strict=True):
            busy[slot.name] += load
        loads = [busy[slot.name] for slot in slots]
    measured = [
        _measure(criterion, slot, peaks[slot.name], load, best)
        for slot, load in zip(slots, loads, strict=True)
    ]
    value = sum(measured) if criterion == TOTAL_SECONDS else max(measured)
    if criterion == STEP_SECONDS:
        value = seconds
    return Partition(
        stages=tuple(stages),
        slots=tuple(slots),
        peaks=peaks,
        replica_peaks=replica_peaks,
        fits=fits,
        transfers=transfers,
        seconds=seconds,
        optimizer_seconds=optimizer,
        optimality=Optimality(
            criterion=criterion,
            value=value,
            lower_bound=value if len(stages) == 1 else min(bound, value),
        ),
        boundaries=_boundaries(best, program, costs, pinned, options, measured, seconds),
    )


def _stages(
    best: Candidate,
    used: Sequence[_Used],
    program: Program,
    costs: CostTable,
    options: PlanningOptions,
    received_from: NDArray[np.float64],
) -> list[StagePlan]:
    t = best.tables
    trained_on = _training_devices(best, used)
    key_of = dict(zip(costs.names, costs.keys, strict=True)) if costs.keys else {}
    stages = []
    for index, (q, x, y) in enumerate(used):
        slot = best.slots[q]
        count = in_flight_at(options, len(used), index)
        optimizer = optimizer_on(options, [slot.name] if options.processes else trained_on)
        received = received_from[index, :index].tolist()
        peaks = peak_bytes(t, count, optimizer, training=options.training, received_from=received)
        seconds = [float(table[x, y]) for table in stage_seconds(t, slot.kind)]
        # One process launches the operations of all shards.
        shards = 1 if options.processes else options.shards
        launching = [shards * float(table[x, y]) for table in launch_seconds(t, slot.kind)]
        # In the order for which the peak was computed
        inside = best.nodes[t.cuts[x] : t.cuts[y + 1]]
        moved = 0
        if copies_overlap(options, slot):
            with_loss = [*inside, len(costs.names)] if y == len(t.cuts) - 2 else inside
            moved, seconds = _overlapped(costs, with_loss, slot.kind)
        if options.processes:  # a pass takes at least as long as its process takes to launch it
            seconds = list(map(max, seconds, launching))
        if device_type(slot.name) == "cpu":  # the process runs the operations itself
            launching = seconds
        names = tuple(program.order[i] for i in inside)
        layers = dict.fromkeys(program.nodes[name].layer for name in names)
        stages.append(
            StagePlan(
                index=index,
                devices=(slot.name,),
                layers=tuple(layer for layer in layers if layer),
                nodes=names,
                memory=_memory(
                    t, x, y, count, optimizer, int(peaks[x, y]), training=options.training
                ),
                budget=slot.budget,
                reserve=slot.reserve,
                forward_seconds=seconds[0],
                backward_seconds=seconds[1] if options.training else 0.0,
                forward_launch_seconds=launching[0],
                backward_launch_seconds=launching[1] if options.training else 0.0,
                host_copy_seconds=moved / slot.kind.host_bandwidth,
                host_copy_nbytes=moved,
                sum_seconds=_sum_seconds(options, len(used), int(t.state.trained[x, y])),
                exchanged_nbytes=int(sum(part[list(inside)].sum() for part in costs.work.sent)),
                regions=find_regions(names, key_of),
            )
        )
    return stages


def _sum_seconds(options: PlanningOptions, stages: int, nbytes: int) -> float:
    """Seconds to sum gradients, of which a rank keeps ``nbytes``, over the ranks of a stage.

    If they are divided, those of each micro-batch; in one process, to copy them once.
    """
    ranks = options.replicas * options.shards
    if not options.training or ranks == 1:
        return 0.0
    if options.processes:
        return options.links.reduce_seconds(
            nbytes * options.state_layout.gradients,
            ranks=ranks,
            stride=options.grid(stages).stride,
            pieces=options.state_layout.gradients,
            rounds=options.microbatches,
        )
    return options.links.send_seconds(nbytes, 0, 1)


def _overlapped(
    costs: CostTable, nodes: Sequence[int], kind: DeviceKind
) -> tuple[int, list[float]]:
    """The bytes that ``nodes`` offload, and the seconds of forward and backward with overlapping copies."""
    seconds = costs.work.seconds(kind)
    moved = [costs.nodes[node].host_nbytes for node in nodes]
    copies = [nbytes / kind.host_bandwidth for nbytes in moved]
    forward, backward = (
        [float(part.device[node]) for node in nodes] for part in (seconds.forward, seconds.backward)
    )
    return sum(moved), [overlapped_forward(forward, copies), overlapped_backward(backward, copies)]


def _find_transfers(
    program: Program,
    costs: CostTable,
    stages: Sequence[StagePlan],
    slots: Sequence[DeviceSlot],
    options: PlanningOptions,
) -> tuple[Transfer, ...]:
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.nodes}
    last = len(stages) - 1
    found = []
    for node, readers in enumerate(costs.readers):
        name, nbytes = program.order[node], costs.nodes[node].output_nbytes
        source = stage_of[name]
        targets = {stage_of[program.order[r]] if r < len(program.order) else last for r in readers}
        for target in sorted(targets - {source}):
            seconds = 0.0
            if slots[source].name != slots[target].name:
                seconds = _send_seconds(options, len(stages), source, target, nbytes)
                bandwidth = min(slots[s].kind.link_bandwidth for s in (source, target))
                seconds = max(seconds, nbytes / bandwidth)
            found.append(
                Transfer(value=name, source=source, target=target, nbytes=nbytes, seconds=seconds)
            )
    return tuple(found)


def _send_seconds(
    options: PlanningOptions, stages: int, source: int, target: int, nbytes: int
) -> float:
    """Seconds from one stage to another, in the replica where that takes the longest."""
    grid = options.grid(stages)
    # Replicas whose first rank is at the same place in a node are alike.
    alike = {grid.rank(dp=dp) % options.links.node: dp for dp in range(options.replicas)}
    return max(
        options.links.send_seconds(nbytes, grid.rank(dp=dp, pp=source), grid.rank(dp=dp, pp=target))
        for dp in alike.values()
    )


def _optimizer_seconds(best: Candidate, used: Sequence[_Used], options: PlanningOptions) -> float:
    """Seconds of the optimizer's step."""
    owned: dict[DeviceSlot, float] = {}
    for q, x, y in used:
        slot = best.slots[q]
        owned[slot] = owned.get(slot, 0.0) + float(best.tables.state.owned[x, y])
    return update_seconds(options, owned.items())


def _memory(
    tables: IntervalTables,
    x: int,
    y: int,
    count: InFlight,
    optimizer: OptimizerMemory,
    peak: int,
    *,
    training: bool,
) -> StageMemory:
    """The memory of the stage from interval ``x`` to ``y`` by kind; the rest of ``peak`` is transient."""
    found = {
        "parameters": int(tables.state.parameters[x, y]),
        "gradients": int(tables.state.trained[x, y]) if training else 0,
        "optimizer": int(optimizer.state * tables.state.owned[x, y]),
        "buffers": int(tables.state.buffers[x, y]),
        "saved": int(saved_bytes(tables, count.most)[x, y]) if training else 0,
    }
    return StageMemory(
        **found,
        boundary=int(tables.received[x, y] + (tables.sent[x, y] if training else 0)),
        transient=max(0, peak - sum(found.values())),
        peak=peak,
    )


def _training_devices(best: Candidate, used: Sequence[_Used]) -> list[str]:
    """The names of the devices that have trained parameters."""
    return [best.slots[q].name for q, x, y in used if best.tables.state.owned[x, y]]


def _device_peaks(
    best: Candidate,
    used: Sequence[_Used],
    stages: Sequence[StagePlan],
    costs: CostTable,
    options: PlanningOptions,
    received_from: NDArray[np.float64],
) -> tuple[dict[str, int], dict[str, int]]:
    """The peak bytes of each device, in the first replica and in any other: the same if each is a process."""
    t = best.tables
    trained_on = _training_devices(best, used)
    updating = dict.fromkeys((slot.name for slot in best.slots), 0.0)
    for q, x, y in used:
        name = best.slots[q].name
        optimizer = optimizer_on(options, [name] if options.processes else trained_on)
        # What updating one parameter after the other allocates is in the peak of a stage already.
        updating[name] += float(t.state.while_updating(replace(optimizer, each=0.0))[x, y])
    peaks = _per_device([(stage, stage.memory.peak) for stage in stages])
    if len(peaks) < len(stages) and may_be_noncontiguous(options, best.slots):
        spans = {
            name: [(x, y + 1) for q, x, y in used if best.slots[q].name == name] for name in peaks
        }
        return (
            device_peaks(t, costs, best.nodes, spans, optimizer_on(options, trained_on)),
            device_peaks(t, costs, best.nodes, spans, None),
        )
    peaks = {name: max(peak, int(updating[name])) for name, peak in peaks.items()}
    if options.processes:
        return peaks, peaks
    of_replica = []
    for index, (stage, (_, x, y)) in enumerate(zip(stages, used, strict=True)):
        count = in_flight_at(options, len(used), index)
        received = received_from[index, :index].tolist()
        found = replica_peak_bytes(t, count, training=options.training, received_from=received)
        of_replica.append((stage, int(found[x, y])))
    return peaks, _per_device(of_replica)


def _received_from(best: Candidate, used: Sequence[_Used], costs: CostTable) -> NDArray[np.float64]:
    """``[r, q]``: the bytes of the values that stage q makes and stage r reads."""
    cuts = best.tables.cuts
    stage = np.empty(len(best.nodes) + 1, dtype=np.int64)
    for index, (_, x, y) in enumerate(used):
        stage[list(best.nodes[cuts[x] : cuts[y + 1]])] = index
    stage[-1] = len(used) - 1  # the loss
    received = np.zeros((len(used), len(used)))
    for node, readers in enumerate(costs.readers):
        for reader in {int(stage[r]) for r in readers} - {int(stage[node])}:
            received[reader, stage[node]] += costs.nodes[node].output_nbytes
    return received


def _criterion(best: Candidate, options: PlanningOptions) -> str:
    limited = any(slot.budget is not None for slot in best.slots)
    if best.limit > 1:
        return PEAK_SHARE
    if options.objective == "memory":
        return PEAK_SHARE if limited else PEAK_BYTES
    by_time = {"throughput": STEP_SECONDS, "latency": TOTAL_SECONDS}
    return by_time.get(options.objective, SLOWEST_SECONDS)


def _measure(
    criterion: str, device: DeviceSlot, peak: int, seconds: float, best: Candidate
) -> float:
    """The load of a device in the unit of the criterion, or of a stage if all seconds are added up."""
    if criterion in (STEP_SECONDS, TOTAL_SECONDS, SLOWEST_SECONDS):
        return seconds
    if criterion == PEAK_BYTES:
        return float(peak)
    return peak_share(peak, device, reference_bytes(best.slots))


def _boundaries(
    best: Candidate,
    program: Program,
    costs: CostTable,
    pinned: Sequence[str | None],
    options: PlanningOptions,
    measured: Sequence[float],
    seconds: float,
) -> tuple[Boundary, ...]:
    """The boundaries between stages, with alternatives unless stages are empty, share a device or are many.

    Alternatives to a step of ``seconds`` are laid out in time, too.
    """
    cuts = best.tables.cuts
    inner = sorted({best.cuts[q] for q in range(1, len(best.cuts) - 1)} - {0, len(cuts) - 1})
    others: list[tuple[float, int | None]] = [(math.inf, None)] * len(inner)
    names = {slot.name for slot in best.slots}
    if len(inner) == len(best.slots) - 1 == len(names) - 1 and len(names) <= MANY_STAGES:
        if _criterion(best, options) == STEP_SECONDS:
            allowed = StageCosts(best.tables, best.slots, pinned, options).allowed(1.0)
            clock = StepClock(best, costs, options)
            others = [(seconds * x, cut) for x, cut in other_places(clock, best.cuts, allowed)]
        else:
            others = boundary_alternatives(best, pinned, options)
    position = {node: i for i, node in enumerate(best.nodes)}
    ends = [
        (
            position[node],
            max(position.get(r, len(position)) for r in readers),
            costs.nodes[node].output_nbytes,
        )
        for node, readers in enumerate(costs.readers)
        if readers
    ]
    found = []
    for index, (cut, (value, other)) in enumerate(zip(inner, others, strict=True)):
        at = cuts[cut]
        found.append(
            Boundary(
                index=index,
                last=program.order[best.nodes[at - 1]],
                first=program.order[best.nodes[at]],
                load_before=measured[index],
                load_after=measured[index + 1],
                nbytes=sum(nbytes for start, end, nbytes in ends if start < at <= end),
                next_best=None if other is None else program.order[best.nodes[cuts[other] - 1]],
                next_value=None if other is None else value,
            )
        )
    return tuple(found)


def _per_device(peaks: Sequence[tuple[StagePlan, int]]) -> dict[str, int]:
    """The peak of each device: the bytes that all its stages keep, and the most that one needs beyond."""
    # For each stage of a device, bytes kept and beyond
    parts: dict[str, list[tuple[int, int]]] = {}
    for stage, peak in peaks:
        kept = min(peak, stage.memory.kept)
        parts.setdefault(stage.devices[0], []).append((kept, peak - kept))
    return {
        name: sum(kept for kept, _ in pairs) + max(beyond for _, beyond in pairs)
        for name, pairs in parts.items()
    }
