"""A captured model on a chain of devices as a `PartitionProblem`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from placer.catalogue import fastest_kind
from placer.cost import CostTable
from placer.partition.candidate import reference_bytes, waiting_at
from placer.partition.solver.problem import PartitionProblem, SharedValue, StageSlot, Vector
from placer.partition.stage_cost.score import optimizer_bytes, unit_seconds
from placer.partition.types import DeviceSlot, PlanningOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelUnits:
    """The units of a model in program order, and what of their costs no device changes.

    The loss is one more unit after all others; it makes no stage by itself.
    """

    order: tuple[int, ...]  # vertices of the unit graph
    unit_of: NDArray[np.int64]  # node (and the loss) -> index in order
    edges: tuple[tuple[int, int], ...]
    values: tuple[SharedValue, ...]
    pins: Mapping[int, str]


def model_units(
    units: nx.DiGraph, order: Sequence[int], costs: CostTable, pin_of: Mapping[int, str]
) -> ModelUnits:
    """The units of ``units`` along ``order`` (program order), with the values that pass between."""
    number = {vertex: i for i, vertex in enumerate(order)}
    loss = len(order)
    unit_of = np.empty(len(costs.nodes), dtype=np.int64)
    unit_of[-1] = loss
    for vertex, i in number.items():
        unit_of[list(units.nodes[vertex]["nodes"])] = i
    edges = [(number[a], number[b]) for a, b in units.edges]
    edges += [(i, loss) for vertex, i in number.items() if not units.out_degree(vertex)]
    values = []
    for node, readers in enumerate(costs.readers):
        held = tuple(sorted({int(unit_of[i]) for i in (node, *readers)}))
        if len(held) > 1 and costs.nodes[node].output_nbytes:
            values.append(SharedValue(nbytes=costs.nodes[node].output_nbytes, units=held))
    for readers, nbytes in zip(costs.input_readers, costs.input_nbytes, strict=True):
        held = tuple(sorted({int(unit_of[i]) for i in readers}))
        if held and nbytes:
            values.append(SharedValue(nbytes=nbytes, units=held, external=True))
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
    """Least time of the slowest stage, with at most ``most_bytes`` on each."""
    slots = []
    for q, (slot, most) in enumerate(zip(chain, most_bytes, strict=True)):
        seconds = unit_seconds(
            costs, slot.kind, training=options.training, own_host=options.processes
        )
        slots.append(
            StageSlot(
                device=slot.name,
                seconds=_by_unit(model, seconds),
                seconds_per_byte=(2 if options.training else 1) / slot.kind.link_bandwidth,
                nbytes=least_bytes(model, costs, options, len(chain), q),
                budget=most,
            )
        )
    return _problem(model, slots, options)


def memory_problem(
    model: ModelUnits, costs: CostTable, chain: Sequence[DeviceSlot], options: PlanningOptions
) -> PartitionProblem:
    """Least bytes of all stages, as shares of their budgets (`reference_bytes` without one)."""
    slots = []
    for q, slot in enumerate(chain):
        held = least_bytes(model, costs, options, len(chain), q)
        share = held / (slot.budget or reference_bytes(chain))
        slots.append(StageSlot(device=slot.name, seconds=share, seconds_per_byte=0.0, nbytes=held))
    return _problem(model, slots, options)


def relaxed_chain(chains: Sequence[Sequence[DeviceSlot]]) -> tuple[DeviceSlot, ...]:
    """A chain of the fastest and largest device of ``chains`` at every position, as many as most."""
    slots = list({slot.name: slot for chain in chains for slot in chain}.values())
    kind = fastest_kind(slot.kind for slot in slots)
    budgets = [slot.budget for slot in slots]
    most = None if None in budgets else max(b for b in budgets if b is not None)
    reserve = min(slot.reserve for slot in slots)
    best = DeviceSlot(name="any", kind=kind, budget=most, reserve=reserve)
    return (best,) * max(map(len, chains))


def _problem(
    model: ModelUnits, slots: Sequence[StageSlot], options: PlanningOptions
) -> PartitionProblem:
    return PartitionProblem(
        num_units=len(model.order) + 1,
        edges=model.edges,
        values=model.values,
        slots=tuple(slots),
        pins=model.pins,
        hollow=frozenset({len(model.order)}),
    )


def least_bytes(
    model: ModelUnits, costs: CostTable, options: PlanningOptions, num_stages: int, stage_index: int
) -> Vector:
    """Bytes per unit that add up to no more than the peak of any stage at that position.

    Parameters, buffers and optimizer state at their first use, and what stays until backward begins
    (saved activations times the micro-batches in flight) or until it has ended (gradients),
    whichever is more in all. What regions recompute or offload is left out.
    """
    static, saved, gradients = (np.zeros(len(model.order) + 1) for _ in range(3))
    state = optimizer_bytes(options.optimizer).state
    uses: dict[str, set[int]] = {}
    for names_of in (costs.parameters_of, costs.buffers_of):
        for node, names in enumerate(names_of):
            for name in names:
                uses.setdefault(costs.alias_of[name], set()).add(int(model.unit_of[node]))
    for name, units in uses.items():
        nbytes, first = costs.state_nbytes[name], min(units)
        static[first] += nbytes
        if options.training and name in costs.trained and len(units) == 1:
            static[first] += state * nbytes
            gradients[first] += nbytes
    if not options.training:
        return static
    for value in costs.values:
        if value.savers and not any(s < len(costs.keys) and costs.keys[s] for s in value.savers):
            saved[min(int(model.unit_of[s]) for s in value.savers)] += value.nbytes
    saved *= waiting_at(options, num_stages, stage_index).most
    total: Vector = static + (saved if saved.sum() >= gradients.sum() else gradients)
    return total


def _by_unit(model: ModelUnits, of_nodes: Vector) -> Vector:
    sums = np.bincount(model.unit_of, weights=of_nodes, minlength=len(model.order) + 1)
    return sums.astype(np.float64)
