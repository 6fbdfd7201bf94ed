"""A chosen candidate as a `Partition`: every stage with what it costs where it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from placer.capture import Capture
from placer.cost import CostTable
from placer.partition.candidate import (
    Candidate,
    border_alternatives,
    optimizer_on,
    reference_bytes,
    waiting_at,
)
from placer.partition.returning import ReturningChains, can_return, device_peaks
from placer.partition.score import (
    peak_bytes,
    replica_peak_bytes,
    saved_bytes,
    stage_seconds,
    transfer_seconds,
)
from placer.partition.types import Demands, DeviceSlot, Partition, PartitionStage
from placer.plan.types import Boundary, Optimality, StageMemory

SLOWEST_SECONDS = "seconds of the slowest stage"
TOTAL_SECONDS = "seconds of all stages"
PEAK_BYTES = "largest peak, bytes"
PEAK_SHARE = "largest peak, share of its budget"


def _received_from(
    best: Candidate, used: Sequence[tuple[int, int, int]], costs: CostTable
) -> NDArray[np.float64]:
    """``[r, q]``: bytes of the values of stage q that stage r reads."""
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


def describe_partition(
    best: Candidate,
    capture: Capture,
    costs: CostTable,
    pinned: Sequence[str | None],
    demands: Demands,
    bound: float,
) -> Partition:
    """The partition of ``best``; ``pinned`` per node of its order, ``bound`` below its criterion."""
    t = best.tables
    used = [(q, x, y - 1) for q, (x, y) in enumerate(itertools.pairwise(best.cuts)) if y > x]
    trains = [best.slots[q].name for q, x, y in used if t.owned[x, y]]
    received_from = _received_from(best, used, costs)
    stages, loads = [], []
    updating = dict.fromkeys((slot.name for slot in best.slots), 0.0)  # bytes while all change
    for index, (q, x, y) in enumerate(used):
        slot = best.slots[q]
        count = waiting_at(demands, len(used), index)
        kept = optimizer_on(demands, [slot.name] if demands.processes else trains)
        waiting = received_from[index, :index].tolist()
        table = peak_bytes(t, count, kept, training=demands.training, received_from=waiting)
        peak = int(table[x, y])
        saved = int(saved_bytes(t, count.most)[x, y]) if demands.training else 0
        boundary = int(t.received[x, y] + (t.sent[x, y] if demands.training else 0))
        memory = StageMemory(
            parameters=int(t.parameters[x, y]),
            gradients=int(t.trained[x, y]) if demands.training else 0,
            optimizer=int(kept.state * t.owned[x, y]),
            buffers=int(t.buffers[x, y]),
            saved=saved,
            boundary=boundary,
            transient=0,
            peak=peak,
        )
        known = memory.parameters + memory.gradients + memory.optimizer + memory.buffers + saved
        memory = replace(memory, transient=max(0, peak - known))
        forward, backward = stage_seconds(t, slot.kind, half=demands.half)
        moved = transfer_seconds(t, slot.kind, training=demands.training)[x, y]
        names = best.nodes[t.cuts[x] : t.cuts[y + 1]]  # the order that its peak is of
        stages.append(
            PartitionStage(
                device=slot,
                nodes=tuple(capture.order[i] for i in names),
                memory=memory,
                replica_peak=int(
                    replica_peak_bytes(t, count, training=demands.training, received_from=waiting)[
                        x, y
                    ]
                ),
                forward_seconds=float(forward[x, y]),
                backward_seconds=float(backward[x, y]) if demands.training else 0.0,
                transfer_seconds=float(moved),
            )
        )
        loads.append(stages[-1].forward_seconds + stages[-1].backward_seconds + float(moved))
        updating[slot.name] += float(t.parameters[x, y] + t.buffers[x, y])
        updating[slot.name] += float((1 + kept.state + kept.together) * t.owned[x, y])
    peaks = _per_device([(stage, stage.memory.peak) for stage in stages])
    peaks = {name: max(peak, int(updating[name])) for name, peak in peaks.items()}
    replica_peaks = _per_device([(stage, stage.replica_peak) for stage in stages])
    spans = {name: [(x, y + 1) for q, x, y in used if best.slots[q].name == name] for name in peaks}
    if len(peaks) < len(stages) and can_return(demands, best.slots):
        peaks = device_peaks(t, costs, best.nodes, spans, optimizer_on(demands, trains))
        replica_peaks = device_peaks(t, costs, best.nodes, spans, None)
    fits = all(
        stage.device.budget is None
        or peaks[stage.device.name] + stage.device.reserve <= stage.device.budget
        for stage in stages
    )
    busy = dict.fromkeys(peaks, 0.0)
    for stage, load in zip(stages, loads, strict=True):
        busy[stage.device.name] += load
    seconds = max(busy.values()) * (demands.microbatches - 1) + sum(loads)
    criterion = _criterion(best, demands)
    if criterion != TOTAL_SECONDS:
        loads = [busy[stage.device.name] for stage in stages]
    measured = [
        _measure(criterion, stage.device, peaks[stage.device.name], load, best)
        for stage, load in zip(stages, loads, strict=True)
    ]
    value = sum(measured) if criterion == TOTAL_SECONDS else max(measured)
    return Partition(
        stages=tuple(stages),
        peaks=peaks,
        replica_peaks=replica_peaks,
        fits=fits,
        seconds=seconds,
        optimality=Optimality(
            criterion=criterion,
            value=value,
            lower_bound=value if len(stages) == 1 else min(bound, value),
        ),
        boundaries=_boundaries(best, capture, costs, pinned, demands, measured),
    )


def _criterion(best: Candidate, demands: Demands) -> str:
    limited = any(slot.budget is not None for slot in best.slots)
    if best.limit > 1:
        return PEAK_SHARE
    if demands.objective == "memory":
        return PEAK_SHARE if limited else PEAK_BYTES
    return TOTAL_SECONDS if demands.objective == "latency" else SLOWEST_SECONDS


def _measure(
    criterion: str, device: DeviceSlot, peak: int, seconds: float, best: Candidate
) -> float:
    """The load of a device (or, of all seconds, of a stage) in the unit of the criterion."""
    if criterion in (TOTAL_SECONDS, SLOWEST_SECONDS):
        return seconds
    if criterion == PEAK_BYTES:
        return float(peak)
    if device.budget is None:
        return peak / reference_bytes(best.slots)
    return (peak + device.reserve) / max(device.budget, 1)


def _boundaries(
    best: Candidate,
    capture: Capture,
    costs: CostTable,
    pinned: Sequence[str | None],
    demands: Demands,
    measured: Sequence[float],
) -> tuple[Boundary, ...]:
    """The borders between the stages; where some are empty, what else could be is not said."""
    cuts = best.tables.cuts
    inner = sorted({best.cuts[q] for q in range(1, len(best.cuts) - 1)} - {0, len(cuts) - 1})
    others: list[tuple[float, int | None]] = [(math.inf, None)] * len(inner)
    if len(inner) == len(best.slots) - 1:
        names = {slot.name for slot in best.slots}
        if len(names) == len(best.slots):
            others = border_alternatives(best, pinned, demands)
        elif can_return(demands, best.slots):
            others = ReturningChains(best, costs, pinned, demands).moves()
    place = {node: i for i, node in enumerate(best.nodes)}
    ends = [
        (
            place[node],
            max(place.get(r, len(place)) for r in readers),
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
                last=capture.order[best.nodes[at - 1]],
                first=capture.order[best.nodes[at]],
                left=measured[index],
                right=measured[index + 1],
                nbytes=sum(nbytes for start, end, nbytes in ends if start < at <= end),
                next_best=None if other is None else capture.order[best.nodes[cuts[other] - 1]],
                next_value=None if other is None else value,
            )
        )
    return tuple(found)


def _per_device(peaks: Sequence[tuple[PartitionStage, int]]) -> dict[str, int]:
    """Peak per device; stages that share one keep what they hold, and one of them is at its peak."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for stage, peak in peaks:
        m = stage.memory
        held = min(peak, m.parameters + m.optimizer + m.buffers + m.gradients + m.saved)
        parts.setdefault(stage.device.name, []).append((held, peak - held))
    return {
        name: sum(held for held, _ in pairs) + max(rest for _, rest in pairs)
        for name, pairs in parts.items()
    }
