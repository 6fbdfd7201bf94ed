"""Lower bounds on what any placement of a model on some chain of devices can reach.

The loss counts as an additional last unit, which cannot be the only one on a stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.machine.catalogue import fastest_kind
from placer.machine.devices import device_type
from placer.partition.candidate import (
    copies_overlap,
    in_flight_at,
    optimizer_on,
    peak_share,
    reference_bytes,
)
from placer.partition.stage_cost.state import unit_state
from placer.partition.types import DeviceSlot, PlanningOptions
from placer.schedule import splits_backward

Vector = NDArray[np.float64]
UnitOf = NDArray[np.int64]  # for every node and the loss, the number of its unit


def number_units(units: nx.DiGraph, order: Sequence[int], costs: CostTable) -> UnitOf:
    """The unit of every node and of the loss, numbered along ``order``; the loss is in one of its own."""
    number = {vertex: i for i, vertex in enumerate(order)}
    unit_of = np.empty(len(costs.nodes), dtype=np.int64)
    unit_of[-1] = len(order)
    for vertex, nodes in units.nodes(data="nodes"):
        unit_of[list(nodes)] = number[vertex]
    return unit_of


def lower_bound(
    unit_of: UnitOf,
    costs: CostTable,
    chains: Sequence[Sequence[DeviceSlot]],
    devices: Sequence[DeviceSlot],
    options: PlanningOptions,
    *,
    of_peaks: bool,
) -> float:
    """A lower bound on the value that is minimised: the largest unit, or an even share of all of them.

    Values that cross boundaries do not count, nor does what the order of operations adds to a peak. If there
    are several ``chains`` of ``devices``, every device is as good as the best one. ``of_peaks``: the largest
    peak is minimised.
    """
    chain = chains[0] if len(chains) == 1 else _relaxed_chain(chains)
    if of_peaks:
        return least_peak(unit_of, costs, chain, devices, options)
    rows = [seconds_by_unit(unit_of, costs, slot, options) for slot in dict.fromkeys(chain)]
    seconds = np.min(rows, axis=0)
    total = float(seconds.sum())
    slowest = max(float(seconds.max(initial=0.0)), total / len(chain))
    if options.objective == "latency":
        return total
    if options.objective != "throughput":
        return slowest
    # One micro-batch runs through all units, and the slowest stage runs all micro-batches. (Under the
    # zero-bubble schedule, gradients of weights may run beside the rest of a micro-batch.)
    if not options.processes and all(device_type(slot.name) == "cpu" for slot in chain):
        return options.microbatches * total
    once = 0.0 if splits_backward(options.schedule) and options.training else total
    return max(once, options.microbatches * slowest)


def seconds_by_unit(
    unit_of: UnitOf, costs: CostTable, slot: DeviceSlot, options: PlanningOptions
) -> Vector:
    """The seconds of every unit on ``slot``: its forward and, in training, its backward.

    The sum over a stage is its `stage_seconds`. If each device has a process of its own, the sum is a lower
    bound, which is exact if all nodes are limited by the device or all by the host. Copies to the host that
    overlap are left out.
    """
    seconds = costs.work.seconds(slot.kind)
    moved = np.array([c.host_nbytes for c in costs.nodes]) / slot.kind.host_bandwidth
    if copies_overlap(options, slot):
        moved = np.zeros_like(moved)
    total = np.zeros(len(costs.nodes))
    for part in (seconds.forward, seconds.backward) if options.training else (seconds.forward,):
        on_device = part.device + moved
        by_host = options.processes and on_device.sum() < part.host.sum()
        total += part.host if by_host else on_device
    return np.bincount(unit_of, weights=total).astype(np.float64)


def _relaxed_chain(chains: Sequence[Sequence[DeviceSlot]]) -> tuple[DeviceSlot, ...]:
    """A chain as long as the longest of ``chains``, of devices that are as fast and large as the best."""
    slots = list({slot.name: slot for chain in chains for slot in chain}.values())
    kind = fastest_kind(slot.kind for slot in slots)
    budgets = [slot.budget for slot in slots]
    most = None if None in budgets else max(b for b in budgets if b is not None)
    withheld = min(slot.withheld for slot in slots)
    best = DeviceSlot(name="any", kind=kind, budget=most, reserve=withheld)
    return (best,) * max(map(len, chains))


def least_bytes(
    unit_of: UnitOf, costs: CostTable, options: PlanningOptions, num_stages: int, stage_index: int
) -> Vector:
    """Bytes per unit whose sum over a stage is a lower bound on the stage's peak.

    ``stage_index`` is the stage's position in the chain. Parameters, buffers and optimizer state count for
    the first unit that uses them. In addition there are either saved activations, times the micro-batches
    in flight, or gradients, whichever are more in total. Activations that are recomputed or offloaded do
    not count.
    """
    count = int(unit_of[-1]) + 1  # with the loss
    state = unit_state(costs, unit_of, count, optimizer_on(options, ()))
    if not options.training:
        return state.static
    saved = np.zeros(count)
    for value in costs.values:
        if value.savers and not any(s < len(costs.keys) and costs.keys[s] for s in value.savers):
            saved[min(int(unit_of[s]) for s in value.savers)] += value.nbytes
    saved *= in_flight_at(options, num_stages, stage_index).most
    return state.static + (saved if saved.sum() >= state.gradients.sum() else state.gradients)


def least_peak(
    unit_of: UnitOf,
    costs: CostTable,
    chain: Sequence[DeviceSlot],
    devices: Sequence[DeviceSlot],
    options: PlanningOptions,
) -> float:
    """A lower bound on the largest `peak_share` of any placement on ``chain``, of some of ``devices``.

    The largest unit, or an even share of all of them, when all activations are saved or in the optimizer's
    step.
    """
    count = len(chain)
    fewest = min(range(count), key=lambda q: in_flight_at(options, count, q).most)
    moments = [least_bytes(unit_of, costs, options, count, fewest)]
    if options.training:
        state = unit_state(costs, unit_of, int(unit_of[-1]) + 1, optimizer_on(options, ()))
        together = min(optimizer_on(options, [slot.name]).together for slot in devices)
        moments.append(state.static + (1 + together) * state.gradients)
    largest, total = (max(float(f(nbytes)) for nbytes in moments) for f in (np.max, np.sum))
    reference = reference_bytes(devices)
    sizes = [slot.budget or reference for slot in chain]
    withheld = [slot.withheld if slot.budget else 0 for slot in chain]
    return max(
        min(peak_share(largest, slot, reference) for slot in chain),
        (total + sum(withheld)) / sum(sizes),
    )
