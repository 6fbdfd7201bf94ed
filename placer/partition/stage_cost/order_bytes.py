"""Counts the bytes of every possible stage along one order of the nodes, as sums of rectangles.

A stage from position a on is a row, and the node that runs, at position i, is a column. Every kind of bytes
is a sum of constants on rectangles of this table, because "some user of v is in [a, i]" holds exactly for a
in (previous user, user] and i >= user. `placer.partition.stage_cost.tables` sums them for given cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.partition.rectangles import Rectangles, Table
from placer.partition.stage_cost.pending_gradients import IntervalCorrection, pending_gradients
from placer.partition.stage_cost.received import Received, find_needs
from placer.partition.stage_cost.region_liveness import RegionLiveness
from placer.partition.stage_cost.state import StateRectangles, state_rectangles

LOSS_NBYTES = 4  # a float32, which is alive during backward


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedValues:
    """Bytes of values that are neither recomputed nor offloaded.

    ``saved`` counts what is alive between forward and backward (``saved_fixed`` is the part that does not
    depend on the number of rows), ``backward`` what is alive during backward, and ``forward`` what is alive
    during forward. ``backward`` includes pending gradients of skip connections. It assumes that a stage
    computes every gradient that it passes on; ``pending`` has the corrections for other stages.
    """

    saved: Rectangles
    saved_fixed: Rectangles
    backward: Rectangles
    forward: Rectangles
    pending: tuple[IntervalCorrection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingValues:
    """Bytes of values that cross stage boundaries.

    ``copies`` are the values, to find copies that are freed before the forward of their stage ends.
    """

    received: Rectangles
    computed: Rectangles
    sent: Rectangles
    results: Rectangles
    copies: tuple[Received, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBytes:
    """The bytes along an order that `build_tables` sums for given cuts. The last stage computes the loss.

    Transient bytes are those alive only while a node runs; there is one entry for each position.
    """

    place: NDArray[np.int64]  # the position of each node
    retained: RetainedValues
    crossing: CrossingValues
    state: StateRectangles
    forward_transient: Table
    backward_transient: Table


def positions_of(order: Sequence[int]) -> NDArray[np.int64]:
    """The position of each node in ``order``; the loss comes last."""
    n = len(order)
    place = np.empty(n + 1, dtype=np.int64)
    place[np.asarray(order, dtype=np.int64)] = np.arange(n)
    place[n] = n
    return place


def find_order_bytes(
    costs: CostTable, place: NDArray[np.int64], regions: RegionLiveness | None = None
) -> OrderBytes:
    """The bytes of stages along an order; ``place`` maps each node to its position.

    Values counted by ``regions`` are left out. With ``regions``, the result is valid for its cuts only.
    """
    count = len(place)
    forwards, backwards = zip(*(_node_transients(costs, i) for i in range(count)), strict=True)
    return OrderBytes(
        place=place,
        retained=_retained_values(costs, place, regions),
        crossing=_crossing_values(costs, place),
        state=state_rectangles(costs, place),
        forward_transient=by_position(place, forwards),
        backward_transient=by_position(place, backwards),
    )


def _retained_values(
    costs: CostTable, place: NDArray[np.int64], regions: RegionLiveness | None
) -> RetainedValues:
    saved, saved_fixed, backward, forward = (Rectangles() for _ in range(4))
    loss = len(place) - 1
    at: list[int] = place.tolist()
    for number, v in enumerate(costs.values):
        if regions is not None and regions.take(number):
            continue
        savers, users = _at(at, v.savers), _at(at, v.users)
        producer = at[v.producer] if v.producer >= 0 else -1
        saved.add_if_any_inside(savers, v.nbytes)
        if v.fixed:
            saved_fixed.add_if_any_inside(savers, v.nbytes)
        if len(savers) == 1:
            backward.add(0, savers[0], savers[0] + 1, v.nbytes)
        else:
            backward.add_if_any_inside(savers, v.nbytes)
        if producer >= 0:
            last = loss + 1 if savers else max(users, default=producer) + 1
            forward.add(0, producer, producer + 1, v.nbytes, until=last)
    pending = pending_gradients(
        costs,
        at,
        lambda x, y, i, j, nbytes: backward.add(x, y, i, nbytes, until=j),
        live_from=None if regions is None else regions.live_from,
    )
    # The loss is alive during the whole backward of its stage, and `build_tables` adds it for stages that end
    # with it. It has been counted above too, so it is subtracted here.
    backward.add(0, loss, loss, -LOSS_NBYTES)
    return RetainedValues(
        saved=saved,
        saved_fixed=saved_fixed,
        backward=backward,
        forward=forward,
        pending=tuple(pending),
    )


def _crossing_values(costs: CostTable, place: NDArray[np.int64]) -> CrossingValues:
    received, computed, sent, results = (Rectangles() for _ in range(4))
    loss = len(place) - 1
    needs = find_needs(costs, place)
    at: list[int] = place.tolist()
    made_by = zip(at, costs.readers, costs.nodes, needs.nodes, strict=False)
    inputs = zip(costs.input_readers, costs.input_nbytes, needs.inputs, strict=True)
    made = [(producer, nodes, cost.output_nbytes, need) for producer, nodes, cost, need in made_by]
    crossing = [
        Received(producer=producer, readers=tuple(_at(at, nodes)), nbytes=nbytes, need=need)
        for producer, nodes, nbytes, need in (*made, *((-1, *each) for each in inputs))
        if nodes
    ]
    for value in crossing:
        producer, readers, nbytes = value.producer, value.readers, value.nbytes
        received.add_if_any_inside(readers, nbytes, after=producer)
        if producer >= 0:
            computed.add_if_any_inside(readers, nbytes, after=producer)
        if producer >= 0 and readers[-1] > producer:
            sent.add(0, producer, producer, nbytes, until=readers[-1])
    returned = sum(value.nbytes for value in crossing if value.readers[-1] == loss)
    results.add(0, loss, loss, returned)
    return CrossingValues(
        received=received, computed=computed, sent=sent, results=results, copies=tuple(crossing)
    )


def _node_transients(costs: CostTable, node: int) -> tuple[int, int]:
    """The bytes alive only while the node's forward runs, and those alive only while its backward runs."""
    key = costs.keys[node] if node < len(costs.keys) else None
    cost = costs.nodes[node]
    if key is not None and key.offload and not key.recompute:
        return cost.forward_transient_offloaded, cost.backward_transient_offloaded
    return cost.forward_transient, cost.backward_transient


def by_position(place: NDArray[np.int64], values: Sequence[float]) -> Table:
    """``values``, which has an entry for each node, rearranged by position."""
    table = np.zeros(len(values))
    table[place] = values
    return table


def _at(place: Sequence[int], nodes: Iterable[int]) -> list[int]:
    """The distinct positions of ``nodes``, ascending."""
    return sorted({place[i] for i in nodes})
