"""Expresses a captured model and a chain of devices as a problem of `benchmarks.solver`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from benchmarks.solver.problem import PartitionProblem, SharedValue, StageSlot
from placer.cost import CostTable
from placer.partition import DeviceSlot, PlanningOptions
from placer.partition.bounds import UnitOf, least_bytes, number_units, seconds_by_unit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelUnits:
    """The units of a model in program order, and the values between them, independent of devices.

    The loss is an additional last unit, which cannot be the only one on a stage.
    """

    order: tuple[int, ...]  # vertices of the unit graph
    unit_of: UnitOf  # for every node and the loss, the index of its unit in ``order``
    edges: tuple[tuple[int, int], ...]
    values: tuple[SharedValue, ...]
    pins: Mapping[int, str]


def model_units(
    units: nx.DiGraph, order: Sequence[int], costs: CostTable, pin_of: Mapping[int, str]
) -> ModelUnits:
    """The units of the graph ``units`` along ``order`` (program order), with the values that they share."""
    number = {vertex: i for i, vertex in enumerate(order)}
    loss = len(order)
    unit_of = number_units(units, order, costs)
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
    slots = [
        StageSlot(
            device=slot.name,
            seconds=seconds_by_unit(model.unit_of, costs, slot, options),
            seconds_per_byte=(2 if options.training else 1) / slot.kind.link_bandwidth,
            nbytes=least_bytes(model.unit_of, costs, options, len(chain), q),
            budget=most,
        )
        for q, (slot, most) in enumerate(zip(chain, most_bytes, strict=True))
    ]
    return PartitionProblem(
        num_units=len(model.order) + 1,
        edges=model.edges,
        values=model.values,
        slots=tuple(slots),
        pins=model.pins,
        auxiliary=frozenset({len(model.order)}),
    )
