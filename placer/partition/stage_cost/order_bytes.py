"""Finds the bytes of stages along one order of nodes, for all positions where stages may begin and end.

Each kind of bytes is a sum of rectangles, because "some user of v is in [a, i]" is true exactly for a in
(previous user, user] and i >= user. `placer.partition.stage_cost.tables` sums them for given cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.partition.stage_cost.pending_gradients import IntervalCorrection, pending_gradients
from placer.partition.stage_cost.received import find_needs, releases
from placer.partition.stage_cost.rectangles import Rectangles, Table
from placer.partition.stage_cost.region_liveness import RegionLiveness
from placer.partition.stage_cost.state import StateRectangles, state_rectangles

LOSS_NBYTES = 4  # a float32, which is alive during backward


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldValues:
    """Bytes of values that no region needs.

    ``saved`` are alive between forward and backward (``saved_fixed`` is the part that does not depend on
    the number of rows), ``waiting`` during backward, ``forward`` during forward. ``waiting`` also has
    pending gradients of skip connections, for stages that compute all gradients that they pass on;
    ``pending`` corrects it for other stages.
    """

    saved: Rectangles
    saved_fixed: Rectangles
    waiting: Rectangles
    forward: Rectangles
    pending: tuple[IntervalCorrection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingValues:
    """Bytes of values that cross boundaries of stages.

    ``released`` has corrections for copies that are freed before their stage's forward ends.
    """

    received: Rectangles
    computed: Rectangles
    sent: Rectangles
    results: Rectangles
    released: tuple[IntervalCorrection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBytes:
    """The bytes that `build_tables` sums for the cuts of an order; the last stage computes the loss.

    Transient bytes, which are alive only while a node runs, are given for each position.
    """

    place: NDArray[np.int64]  # the position of each node
    held: HeldValues
    crossing: CrossingValues
    state: StateRectangles
    forward_transient: Table
    backward_transient: Table


def positions_of(order: Sequence[int]) -> NDArray[np.int64]:
    """The position of each node along ``order``; the loss is last."""
    n = len(order)
    place = np.empty(n + 1, dtype=np.int64)
    place[np.asarray(order, dtype=np.int64)] = np.arange(n)
    place[n] = n
    return place


def find_order_bytes(
    costs: CostTable, place: NDArray[np.int64], regions: RegionLiveness | None = None
) -> OrderBytes:
    """The bytes of stages along the order in which ``place`` has the position of each node.

    Values that ``regions`` counts are left out; if it is given, the result is for its cuts only.
    """
    count = len(place)
    forwards, backwards = zip(*(node_transients(costs, i) for i in range(count)), strict=True)
    return OrderBytes(
        place=place,
        held=_held_values(costs, place, regions),
        crossing=_crossing_values(costs, place),
        state=state_rectangles(costs, place),
        forward_transient=by_position(place, forwards),
        backward_transient=by_position(place, backwards),
    )


def _held_values(
    costs: CostTable, place: NDArray[np.int64], regions: RegionLiveness | None
) -> HeldValues:
    saved, saved_fixed, waiting, forward = (Rectangles() for _ in range(4))
    loss = len(place) - 1
    for number, v in enumerate(costs.values):
        if regions is not None and regions.take(number):
            continue
        savers, users = _at(place, v.savers), _at(place, v.users)
        producer = int(place[v.producer]) if v.producer >= 0 else -1
        saved.some(savers, v.nbytes)
        if v.fixed:
            saved_fixed.some(savers, v.nbytes)
        if len(savers) == 1:
            waiting.add(0, savers[0], savers[0] + 1, v.nbytes)
        else:
            waiting.some(savers, v.nbytes)
        if producer >= 0:
            last = loss + 1 if savers else max(users, default=producer) + 1
            forward.add(0, producer, producer + 1, v.nbytes, until=last)
    pending = pending_gradients(
        costs,
        place,
        lambda x, y, i, j, nbytes: waiting.add(x, y, i, nbytes, until=j),
        held_from=None if regions is None else regions.held_from,
    )
    # The loss is alive during the whole backward of its stage, and is added to the tables of stages that
    # end with it. So it is subtracted here, where it has been counted already.
    waiting.add(0, loss, loss, -LOSS_NBYTES)
    return HeldValues(
        saved=saved,
        saved_fixed=saved_fixed,
        waiting=waiting,
        forward=forward,
        pending=tuple(pending),
    )


def _crossing_values(costs: CostTable, place: NDArray[np.int64]) -> CrossingValues:
    received, computed, sent, results = (Rectangles() for _ in range(4))
    released: list[IntervalCorrection] = []
    loss = len(place) - 1
    needs = find_needs(costs, place)
    crossing = [
        *(
            (int(place[i]), _at(place, r), costs.nodes[i].output_nbytes, needs.nodes[i])
            for i, r in enumerate(costs.readers)
        ),
        *(
            (-1, _at(place, r), b, need)
            for r, b, need in zip(
                costs.input_readers, costs.input_nbytes, needs.inputs, strict=True
            )
        ),
    ]
    for producer, readers, nbytes, need in crossing:
        received.some(readers, nbytes, after=producer)
        if readers:
            released += releases(producer, readers, need, nbytes)
        if producer >= 0:
            computed.some(readers, nbytes, after=producer)
        if producer >= 0 and readers and readers[-1] > producer:
            sent.add(0, producer, producer, nbytes, until=readers[-1])
    returned = sum(b for _, readers, b, _ in crossing if readers and readers[-1] == loss)
    results.add(0, loss, loss, returned)
    return CrossingValues(
        received=received, computed=computed, sent=sent, results=results, released=tuple(released)
    )


def node_transients(costs: CostTable, node: int) -> tuple[int, int]:
    """The bytes that are alive only while the node's forward runs, and only while its backward does."""
    key = costs.keys[node] if node < len(costs.keys) else None
    cost = costs.nodes[node]
    if key is not None and key.offload and not key.recompute:
        return cost.forward_transient_offloaded, cost.backward_transient_offloaded
    return cost.forward_transient, cost.backward_transient


def by_position(place: NDArray[np.int64], values: Sequence[float]) -> Table:
    """``values`` of nodes, ordered by position."""
    table = np.zeros(len(values))
    table[place] = values
    return table


def _at(place: NDArray[np.int64], nodes: Iterable[int]) -> list[int]:
    """The positions of ``nodes``, each once, in order."""
    return sorted({int(place[i]) for i in nodes})
