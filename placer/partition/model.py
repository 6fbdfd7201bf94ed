"""Expresses a captured model and a chain of devices as a problem of `placer.partition.solver`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from placer.partition.solver.problem import (
    PartitionProblem,
    SharedValue,
    StageSlot,
    Vector,
    simple_bound,
)
from placer.partition.stage_cost.score import unit_seconds
from placer.partition.stage_cost.state import unit_state
from placer.partition.types import DeviceSlot, PlanningOptions
from placer.schedule import splits_backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelUnits:
    """The units of a model in program order, and the values between them, independent of devices.

    The loss is an additional last unit, which cannot be the only one on a stage.
    """

    order: tuple[int, ...]  # vertices of the unit graph
    unit_of: NDArray[np.int64]  # for every node and the loss, the index of its unit in ``order``
    edges: tuple[tuple[int, int], ...]
    values: tuple[SharedValue, ...]
    pins: Mapping[int, str]


def model_units(
    units: nx.DiGraph, order: Sequence[int], costs: CostTable, pin_of: Mapping[int, str]
) -> ModelUnits:
    """The units of the graph ``units`` along ``order`` (program order), with the values that they share."""
    number = {vertex: i for i, vertex in enumerate(order)}
    loss = len(order)
    unit_of = np.empty(len(costs.nodes), dtype=np.int64)
    unit_of[-1] = loss
    for vertex, nodes in units.nodes(data="nodes"):
        unit_of[list(nodes)] = number[vertex]
    edges = [(number[a], number[b]) for a, b in units.edges]
    edges += [(i, loss) for vertex, i in number.items() if not units.out_degree(vertex)]
    values = []
    of_node = unit_of.tolist()
    for node, readers in enumerate(costs.readers):
        sharing = tuple(sorted({of_node[i] for i in (node, *readers)}))
        if len(sharing) > 1 and costs.nodes[node].output_nbytes:
            values.append(SharedValue(nbytes=costs.nodes[node].output_nbytes, units=sharing))
    for readers, nbytes in zip(costs.input_readers, costs.input_nbytes, strict=True):
        sharing = tuple(sorted({of_node[i] for i in readers}))
        if sharing and nbytes:
            values.append(SharedValue(nbytes=nbytes, units=sharing, external=True))
    return ModelUnits(
        order=tuple(order),
        unit_of=unit_of,
        edges=tuple(sorted(edges)),
        values=tuple(values),
        pins={number[vertex]: device for vertex, device in pin_of.items()},
    )


def seconds_problem(
    model: ModelUnits,
    costs: CostTable,
    chain: Sequence[DeviceSlot],
    options: PlanningOptions,
    most_bytes: Sequence[float | None],
) -> PartitionProblem:
    """The problem of minimising the seconds of the slowest stage, with at most ``most_bytes`` on each."""
    slots = []
    needed = least_bytes(model, costs, options, len(chain))
    for slot, most, nbytes in zip(chain, most_bytes, needed, strict=True):
        seconds = unit_seconds(
            costs,
            slot.kind,
            training=options.training,
            own_host=options.processes,
            overlapped=copies_overlap(options, slot),
        )
        slots.append(
            StageSlot(
                device=slot.name,
                seconds=_by_unit(model, seconds),
                seconds_per_byte=(2 if options.training else 1) / slot.kind.link_bandwidth,
                nbytes=nbytes,
                budget=most,
            )
        )
    return _problem(model, slots)


def shortest_step(
    problem: PartitionProblem, chain: Sequence[DeviceSlot], options: PlanningOptions
) -> float:
    """A lower bound on the seconds of a step, from the seconds of the units of `seconds_problem`.

    One micro-batch runs through all units, and the slowest stage runs all micro-batches. (Under the
    zero-bubble schedule, gradients of weights may run beside the rest of a micro-batch.)
    """
    total = float(np.min([slot.seconds for slot in problem.slots], axis=0).sum())
    once = 0.0 if splits_backward(options.schedule) and options.training else total
    if not options.processes and all(device_type(slot.name) == "cpu" for slot in chain):
        return options.microbatches * total
    return max(once, options.microbatches * simple_bound(problem))


def memory_problem(
    model: ModelUnits, costs: CostTable, chain: Sequence[DeviceSlot], options: PlanningOptions
) -> PartitionProblem:
    """The problem of minimising the largest share of a budget (or of `reference_bytes`) of any stage."""
    slots = []
    for slot, nbytes in zip(chain, least_bytes(model, costs, options, len(chain)), strict=True):
        share = nbytes / (slot.budget or reference_bytes(chain))
        slots.append(
            StageSlot(device=slot.name, seconds=share, seconds_per_byte=0.0, nbytes=nbytes)
        )
    return _problem(model, slots)


def relaxed_chain(chains: Sequence[Sequence[DeviceSlot]]) -> tuple[DeviceSlot, ...]:
    """A chain as long as the longest of ``chains``, of devices that are as fast and large as the best."""
    slots = list({slot.name: slot for chain in chains for slot in chain}.values())
    kind = fastest_kind(slot.kind for slot in slots)
    budgets = [slot.budget for slot in slots]
    most = None if None in budgets else max(b for b in budgets if b is not None)
    withheld = min(slot.withheld for slot in slots)
    best = DeviceSlot(name="any", kind=kind, budget=most, reserve=withheld)
    return (best,) * max(map(len, chains))


def _problem(model: ModelUnits, slots: Sequence[StageSlot]) -> PartitionProblem:
    return PartitionProblem(
        num_units=len(model.order) + 1,
        edges=model.edges,
        values=model.values,
        slots=tuple(slots),
        pins=model.pins,
        auxiliary=frozenset({len(model.order)}),
    )


def least_bytes(
    model: ModelUnits, costs: CostTable, options: PlanningOptions, num_stages: int
) -> list[Vector]:
    """For every stage of a chain, bytes per unit whose sum over the stage is a lower bound on its peak.

    Parameters, buffers and optimizer state count for the first unit that uses them. In addition there are
    either saved activations, times the micro-batches in flight, or gradients, whichever are more in total.
    Activations that are recomputed or offloaded do not count.
    """
    count = len(model.order) + 1  # with the loss
    state = unit_state(costs, model.unit_of, count, optimizer_on(options, ()))
    if not options.training:
        return [state.static] * num_stages
    saved = np.zeros(count)
    for value in costs.values:
        if value.savers and not any(s < len(costs.keys) and costs.keys[s] for s in value.savers):
            saved[min(int(model.unit_of[s]) for s in value.savers)] += value.nbytes
    in_flight = [in_flight_at(options, num_stages, q).most for q in range(num_stages)]
    kept, gradients = saved.sum(), state.gradients.sum()
    return [
        state.static + (n * saved if n * kept >= gradients else state.gradients) for n in in_flight
    ]


def least_peak(
    model: ModelUnits,
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
    moments = [least_bytes(model, costs, options, count)[fewest]]
    if options.training:
        state = unit_state(costs, model.unit_of, len(model.order) + 1, optimizer_on(options, ()))
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


def _by_unit(model: ModelUnits, of_nodes: Vector) -> Vector:
    sums = np.bincount(model.unit_of, weights=of_nodes, minlength=len(model.order) + 1)
    return sums.astype(np.float64)
