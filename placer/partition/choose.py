"""Choose which nodes run on which device: pinned layers kept, the rest where it serves best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placer.capture import Capture
from placer.cost import CostTable
from placer.partition.chain import Mask, Table, best_cuts
from placer.partition.score import (
    IntervalTables,
    build_tables,
    optimizer_bytes,
    peak_bytes,
    replica_peak_bytes,
    stage_seconds,
    transfer_seconds,
)
from placer.partition.types import Demands, DeviceSlot, Partition, PartitionStage
from placer.partition.units import grouped_order, program_order, unit_graph
from placer.plan.types import StageMemory
from placer.schedule import InFlight, in_flight, make_schedule

_MOST_CUTS = 400  # more candidate borders than this are thinned to the cheapest ones
_SLACK = 1.005  # how far above the least bottleneck the next criterion may go
_MOST_CHAINS = 64  # device orders that are tried when devices differ or are only partly pinned


def choose_partition(
    capture: Capture,
    costs: CostTable,
    devices: Sequence[DeviceSlot],
    pins: Mapping[str, str],
    demands: Demands,
) -> Partition:
    """The best chain of stages on ``devices`` that keeps every node of ``pins`` on its device.

    Every device gets a stage as long as there are nodes to go round. Among placements within the
    budgets the objective decides; when there is none, the answer has the least overflow and
    ``fits`` is False. Optimal for the orders of nodes and of devices that are tried (the program's
    order, and one grouped by pins), not over all.
    """
    units = unit_graph(capture)
    position = {name: i for i, name in enumerate(capture.order)}
    pin_of = _unit_pins(units, {position[name]: device for name, device in pins.items()})
    best: _Candidate | None = None
    orders = [program_order(units)]
    if len(set(pin_of.values())) > 1:
        orders.append(grouped_order(units, pin_of))
    for order in orders:
        nodes = [i for unit in order for i in units.nodes[unit]["nodes"]]
        cuts = _cuts(units, order, costs, set(pin_of), pin_of)
        tables = build_tables(costs, nodes, cuts)
        pinned = [pin_of.get(unit) for unit in order for _ in units.nodes[unit]["nodes"]]
        for chain in _chains(devices, pinned, len(cuts) - 1):
            found = _solve(tables, chain, pinned, demands)
            if found is not None and (best is None or found.rank < best.rank):
                best = replace(found, nodes=tuple(nodes))
    assert best is not None, "a chain that follows the pins is always feasible"
    return _describe(best, capture, costs, demands)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Devices in the order of their stages; a device may come twice when pins ask for it."""

    slots: tuple[DeviceSlot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    rank: tuple[float, ...]  # smaller is better
    tables: IntervalTables
    slots: tuple[DeviceSlot, ...]
    cuts: tuple[int, ...]
    nodes: tuple[int, ...] = ()


def _unit_pins(units: object, pins: Mapping[int, str]) -> dict[int, str]:
    """Unit -> device; a unit whose nodes are pinned to several goes to that of its first node."""
    found: dict[int, str] = {}
    for unit, nodes in units.nodes(data="nodes"):  # type: ignore[attr-defined]
        devices = [pins[i] for i in nodes if i in pins]
        if devices:
            found[unit] = devices[0]
    return found


def _cuts(
    units: object,
    order: Sequence[int],
    costs: CostTable,
    pinned: set[int],
    pin_of: Mapping[int, str],
) -> list[int]:
    """Positions between units where a stage may end; borders between pins always among them."""
    ends = list(itertools.accumulate(len(units.nodes[u]["nodes"]) for u in order))  # type: ignore[attr-defined]
    borders = ends[:-1]
    if len(borders) > _MOST_CUTS:
        place = {}
        for i, node in enumerate(n for u in order for n in units.nodes[u]["nodes"]):  # type: ignore[attr-defined]
            place[node] = i
        crossing = np.zeros(len(place) + 2)
        for node, readers in enumerate(costs.readers):
            if readers:
                last = max(place.get(r, len(place)) for r in readers)
                crossing[place[node] + 1] += costs.nodes[node].output_nbytes
                crossing[last + 1] -= costs.nodes[node].output_nbytes
        crossing = np.cumsum(crossing)
        window = -(-len(borders) // _MOST_CUTS)
        kept = {
            min(borders[i : i + window], key=lambda b: (crossing[b], b))
            for i in range(0, len(borders), window)
        }
        previous = None
        for unit, end in zip(order, ends, strict=True):
            pin = pin_of.get(unit)
            if pin is not None:
                if previous is not None and previous[0] != pin:
                    kept.update((previous[1], end - len(units.nodes[unit]["nodes"])))  # type: ignore[attr-defined]
                previous = (pin, end)
        borders = sorted(kept)
    return [0, *borders, ends[-1]]


def _chains(
    devices: Sequence[DeviceSlot], pinned: Sequence[str | None], most: int
) -> Iterator[_Chain]:
    """Chains of devices that follow the pins, free devices put in everywhere they could go."""
    by_name = {slot.name: slot for slot in devices}
    runs = [name for name, _ in itertools.groupby(p for p in pinned if p is not None)]
    fixed = [by_name[name] for name in runs]
    free = [slot for slot in devices if slot.name not in runs]
    kinds = {(s.kind.name, s.budget, s.reserve) for s in free}
    arrangements = itertools.permutations(free) if len(kinds) > 1 else iter([tuple(free)])
    tried = 0
    for arrangement in arrangements:
        for gaps in itertools.combinations_with_replacement(range(len(fixed) + 1), len(free)):
            chain: list[DeviceSlot] = []
            for i in range(len(fixed) + 1):
                chain += [s for s, gap in zip(arrangement, gaps, strict=True) if gap == i]
                chain += fixed[i : i + 1]
            yield _Chain(slots=tuple(chain))
            tried += 1
            if tried >= _MOST_CHAINS:
                return


def _in_flight(demands: Demands, num_stages: int, stage_index: int) -> InFlight:
    if demands.microbatches == 1 or not demands.training:
        return InFlight(microbatches=demands.microbatches)
    schedule = make_schedule(demands.schedule, num_stages, demands.microbatches)
    return in_flight(schedule, stage_index)


def _solve(
    tables: IntervalTables, chain: _Chain, pinned: Sequence[str | None], demands: Demands
) -> _Candidate | None:
    slots = chain.slots
    counts = [_in_flight(demands, len(slots), q) for q in range(len(slots))]
    kept = optimizer_bytes(demands.optimizer if demands.training else "sgd")
    peaks = [peak_bytes(tables, c, kept, training=demands.training) for c in counts]
    times = [_seconds(tables, slot, demands) for slot in slots]
    held = [_pin_mask(tables, pinned, slot.name) for slot in slots]
    ratios = [_ratio(peak, slot) for peak, slot in zip(peaks, slots, strict=True)]
    enough = len(tables.cuts) - 1 >= len(slots)
    empty = [not enough] * len(slots)
    result = best_cuts(ratios, held, combine="max", may_be_empty=empty)
    if result is None:
        empty = [True] * len(slots)
        result = best_cuts(ratios, held, combine="max", may_be_empty=empty)
    if result is None:
        return None
    cuts, least = result
    limited = any(slot.budget is not None for slot in slots)
    over = limited and least > 1.0
    if not over:
        if demands.objective == "memory":
            limit = least * _SLACK if not limited else min(1.0, least * _SLACK)
        else:
            limit = 1.0 if limited else np.inf
        allowed = [h & (r <= limit) for h, r in zip(held, ratios, strict=True)]
        cuts = _fastest(times, allowed, empty, demands.objective)
    load = [times[q][x, y - 1] for q, (x, y) in enumerate(itertools.pairwise(cuts)) if y > x]
    ratio = max(ratios[q][x, y - 1] for q, (x, y) in enumerate(itertools.pairwise(cuts)) if y > x)
    step = max(load) * (demands.microbatches - 1) + sum(load)
    rank = (ratio if over or demands.objective == "memory" else 0.0, max(load), step)
    if demands.objective == "latency":
        rank = (rank[0], sum(load), max(load))
    return _Candidate(rank=(float(over), *rank), tables=tables, slots=slots, cuts=cuts)


def _fastest(
    times: Sequence[Table], allowed: Sequence[Mask], empty: Sequence[bool], objective: str
) -> tuple[int, ...]:
    if objective == "latency":
        result = best_cuts(times, allowed, combine="sum", may_be_empty=empty)
        assert result is not None
        return result[0]
    result = best_cuts(times, allowed, combine="max", may_be_empty=empty)
    assert result is not None
    near = [a & (t <= result[1] * _SLACK) for a, t in zip(allowed, times, strict=True)]
    second = best_cuts(times, near, combine="sum", may_be_empty=empty)
    assert second is not None
    return second[0]


def _seconds(tables: IntervalTables, slot: DeviceSlot, demands: Demands) -> Table:
    forward, backward = stage_seconds(tables, slot.kind, half=demands.half)
    moved = transfer_seconds(tables, slot.kind, training=demands.training)
    return forward + moved + (backward if demands.training else 0.0)


def _ratio(peak: Table, slot: DeviceSlot) -> Table:
    """Peak as a share of the budget; without one, of a fixed size, so that devices compare."""
    if slot.budget is None:
        return peak / 2**30
    return (peak + slot.reserve) / slot.budget if slot.budget else np.full_like(peak, np.inf)


def _pin_mask(tables: IntervalTables, pinned: Sequence[str | None], name: str) -> Mask:
    """Which intervals hold no node that is pinned to another device."""
    foreign = np.cumsum([0, *(p is not None and p != name for p in pinned)])
    at = foreign[np.asarray(tables.cuts)]
    mask: Mask = at[None, 1:] == at[:-1, None]
    return mask


def _received_from(
    best: _Candidate, used: Sequence[tuple[int, int, int]], costs: CostTable
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


def _describe(best: _Candidate, capture: Capture, costs: CostTable, demands: Demands) -> Partition:
    t = best.tables
    used = [(q, x, y - 1) for q, (x, y) in enumerate(itertools.pairwise(best.cuts)) if y > x]
    kept = optimizer_bytes(demands.optimizer if demands.training else "sgd")
    received_from = _received_from(best, used, costs)
    stages, loads = [], []
    for index, (q, x, y) in enumerate(used):
        slot = best.slots[q]
        count = _in_flight(demands, len(used), index)
        waiting = received_from[index, :index].tolist()
        table = peak_bytes(t, count, kept, training=demands.training, received_from=waiting)
        peak = int(table[x, y])
        saved = int(t.saved[x, y]) * count.most if demands.training else 0
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
        names = sorted(best.nodes[t.cuts[x] : t.cuts[y + 1]])
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
    peaks = _per_device([(stage, stage.memory.peak) for stage in stages])
    fits = all(
        stage.device.budget is None
        or peaks[stage.device.name] + stage.device.reserve <= stage.device.budget
        for stage in stages
    )
    seconds = max(loads) * (demands.microbatches - 1) + sum(loads)
    return Partition(
        stages=tuple(stages),
        peaks=peaks,
        replica_peaks=_per_device([(stage, stage.replica_peak) for stage in stages]),
        fits=fits,
        seconds=seconds,
    )


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
