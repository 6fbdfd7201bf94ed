"""Computes a lower bound on the largest peak of any placement.

A unit is a group of nodes that must stay on one stage. A device computes a set D of units, in one stage or
several. While the backward of a node i of D runs, these bytes of `placer.partition.stage_cost.score` are on
the device:

    static(D)                        parameters, buffers, optimizer state: always
  + saved(j), j in D before i        their forward has ended, and their backward has not begun
  + gradients(j), j in D after i     their backward has ended
  + alone(i)                         what only i saved, what it received, and what its backward allocates

In any order of the stages, ancestors of i come before i and descendants after it. Every other unit j counts
by the smaller of saved(j) and gradients(j). Two bounds follow for all placements on N devices:

1. The device of a unit has at least the bytes that the unit needs by itself at the worst of these moments:
   its backwards, its forwards with the values that they read, and the optimizer's step.
2. Let H be a set of units, and excess(i) the most bytes in a backward of unit i beyond static(i) +
   saved(i). Let w(j) = static(j) + saved(j), or the least that j can count if j is not before all of H.
   A device with some units of H has at least w of all its units, plus the excess of its last unit of H
   in program order. Any other device has at least w of its units. Let h devices have units of H, and let T
   be the largest peak. Then

       N T >= w(all) + excess(last of H) + the h - 1 least excesses      (summed over all devices)
       h T >= w(H) + h times the least excess                            (over those with units of H)

   For each h, T is at least the larger of the two; the bound is the smallest of these over all h. For H we
   try the units with the largest excess from some position in the program on, for several positions and
   sizes.

The first bound is larger if one operation is large, the second if there are few devices. With several
micro-batches in flight, saved(j) counts once for each. Activations that regions recompute or offload count
only in alone(i).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.partition.candidate import in_flight_at, optimizer_on, peak_share, reference_bytes
from placer.partition.model import ModelUnits
from placer.partition.stage_cost.order_bytes import node_transients
from placer.partition.stage_cost.state import UnitState, unit_state
from placer.partition.types import DeviceSlot, PlanningOptions

# Larger graphs get the first bound only, because the second one compares all pairs of units.
_MAX_UNITS = 2_000
_MAX_IN_GROUP, _MAX_STARTS = 64, 32  # units in H; positions in the program

Bytes = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Lower bounds on the bytes of each unit, in any stage that has it."""

    static: Bytes
    saved: (
        Bytes  # between its forward and its backward; each value counts for only one of its savers
    )
    gradients: Bytes  # of its own parameters, after its backward
    excess: Bytes  # in the worst of its backwards, beyond static + saved
    alone: Bytes  # at the worst moment, if the stage has no other unit


def least_peak(
    model: ModelUnits,
    costs: CostTable,
    devices: Sequence[DeviceSlot],
    num_stages: int,
    options: PlanningOptions,
) -> float:
    """A lower bound on the largest `peak_share` of any placement on ``devices``.

    ``num_stages`` is the length of the longest chain of devices; a repeated device counts each time.
    Takes O(nodes + units^2 / 8 + groups * units) time.
    """
    units = unit_bytes(model, costs, options, [slot.name for slot in devices])
    nbytes = float(units.alone.max(initial=0.0))
    if options.training and len(model.order) <= _MAX_UNITS:
        stages = (in_flight_at(options, num_stages, q) for q in range(num_stages))
        others = min(stage.first_backward for stage in stages)
        nbytes = max(nbytes, _least_of_groups(units, model.edges, num_stages, others))
    return min(peak_share(nbytes, slot, reference_bytes(devices)) for slot in devices)


def _least_of_groups(
    units: UnitBytes, edges: Iterable[tuple[int, int]], devices: int, others: float
) -> float:
    """The second bound; at least ``others`` other micro-batches are in flight in a first backward."""
    count = len(units.static)
    before = _ancestors(count, edges)
    full = units.static + (1 + others) * units.saved
    part = full - units.saved + np.minimum(units.saved, units.gradients)
    least = 0.0
    large = np.argsort(-units.excess, kind="stable")
    for start in np.unique(np.linspace(0, count - 1, _MAX_STARTS).astype(np.int64)):
        group = np.zeros(count, dtype=bool)
        # Before all other units of the group; for a unit in it, before those after it
        is_before = np.ones(count, dtype=bool)
        chosen = large[(large >= start) & (units.excess[large] > 0)][:_MAX_IN_GROUP]
        for unit in chosen:
            later = np.flatnonzero(group[unit:]) + unit
            outside = ~group
            outside[:unit] = True
            is_before &= before[unit] | ~outside
            is_before[unit] = bool(before[later, unit].all())
            group[unit] = True
            bytes_of = np.where(is_before, full, part)
            excess = np.sort(units.excess[group])
            last = units.excess[np.flatnonzero(group)[-1]]
            rest = np.delete(excess, np.searchsorted(excess, last))
            hosts = np.arange(1, min(devices, len(excess)) + 1)
            added = last + np.concatenate([[0.0], np.cumsum(rest)])[: len(hosts)]
            spread = (bytes_of.sum() + added) / devices
            packed = bytes_of[group].sum() / hosts + excess[0]
            least = max(least, float(np.maximum(spread, packed).min()))
    return least


def _ancestors(count: int, edges: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """Entry ``[u, v]`` says whether v is an ancestor of u. Units are numbered in a topological order."""
    before = np.zeros((count, count), dtype=bool)
    for a, b in sorted(edges, key=lambda edge: edge[1]):
        if b < count:
            before[b] |= before[a]
            before[b, a] = True
    return before


def unit_bytes(
    model: ModelUnits, costs: CostTable, options: PlanningOptions, devices: Sequence[str]
) -> UnitBytes:
    """The bytes of the units of ``model`` on any of ``devices`` (names). Takes O(nodes + uses) time."""
    count = len(model.order)
    state = unit_state(costs, model.unit_of, count, optimizer_on(options, devices))
    saved, excess, alone = np.zeros(count), np.zeros(count), state.copies.copy()
    if options.training:
        alone += state.gradients + _updating(state, options, devices)
    nodes_of: list[list[int]] = [[] for _ in range(count)]
    for node in range(len(costs.names)):
        nodes_of[int(model.unit_of[node])].append(node)
    values = _Values(model, costs)
    for unit, nodes in enumerate(nodes_of):
        moments = []
        if (
            options.microbatches == 1
        ):  # otherwise the only forward with this memory may be that of a smaller micro-batch
            moments.append(_most_in_forward(costs, values, unit, nodes))
        if options.training:
            backward = _unit_backward(costs, values, unit, nodes, state.own[unit])
            saved[unit] = backward.saved
            excess[unit] = max(0.0, backward.most - backward.saved)
            moments.append(backward.most_alone)
        alone[unit] = max([alone[unit], *(state.copies[unit] + nbytes for nbytes in moments)])
    return UnitBytes(
        static=state.static, saved=saved, gradients=state.gradients, excess=excess, alone=alone
    )


def _updating(state: UnitState, options: PlanningOptions, devices: Sequence[str]) -> Bytes:
    """Temporary bytes of the optimizer's step for each unit, on the device where they are fewest."""
    largest = np.array([max((nbytes for _, nbytes in own), default=0) for own in state.own])
    optimizers = [optimizer_on(options, [name]) for name in devices]
    # Twice the largest parameter is at most `StageState.updating`.
    steps = [how.together * state.gradients + 2 * how.each * largest for how in optimizers]
    least: Bytes = np.min(steps, axis=0)
    return least


def _most_in_forward(costs: CostTable, values: _Values, unit: int, nodes: Sequence[int]) -> float:
    """The most bytes, besides the state, in the forward of a unit's nodes."""
    forward = (node_transients(costs, node)[0] + values.read(node, unit) for node in nodes)
    return max(forward, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitBackward:
    """Bytes of a unit, besides its state, between its forward and its backward and during its backward."""

    saved: float  # each value counts only for the first of all its savers
    most: float  # during a backward, with values counted in the same way
    most_alone: float  # during a backward, with all values that the unit saves


def _unit_backward(
    costs: CostTable,
    values: _Values,
    unit: int,
    nodes: Sequence[int],
    own: Sequence[tuple[int, int]],
) -> _UnitBackward:
    kept_so_far, saved_so_far = 0.0, 0.0  # all that the unit saves; the part that counts for it
    most, most_alone = 0.0, 0.0
    for node in nodes:
        mine, counted, less = values.saved(node, unit)
        ended = sum(nbytes for first, nbytes in own if first > node)
        moment = max(0.0, node_transients(costs, node)[1] - less - values.later(node)) + ended
        kept_so_far += mine.shared
        saved_so_far += counted.shared
        most_alone = max(most_alone, kept_so_far + moment)
        most = max(most, saved_so_far + moment)
        # Added only now, because the node's own transient bytes include it
        kept_so_far += mine.single
        saved_so_far += counted.single
    return _UnitBackward(saved=saved_so_far, most=most, most_alone=most_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """Bytes that a node saves: ``shared`` with other savers, and ``single``, which only it saves."""

    shared: float = 0.0
    single: float = 0.0


class _Values:
    """Lower bounds on the bytes that nodes read and save; a received value may be only a part."""

    def __init__(self, model: ModelUnits, costs: CostTable) -> None:
        self._model, self._costs = model, costs
        self._least = _least_copies(costs)
        self._users: dict[int, list[int]] = defaultdict(list)
        self._savers: dict[int, list[int]] = defaultdict(list)
        for index, value in enumerate(costs.values):
            nodes = {*value.users, *value.savers, *([value.producer] * (value.producer >= 0))}
            if costs.keys and any(costs.keys[i] for i in nodes if i < len(costs.keys)):
                continue  # a region may recompute or offload it
            for node in value.users:
                self._users[node].append(index)
            for node in value.savers:
                self._savers[node].append(index)
        self._later: dict[int, float] = defaultdict(float)
        for gradient in costs.gradients:
            apart = gradient.home != gradient.target
            self._later[gradient.target] += gradient.nbytes if apart else gradient.surplus

    def later(self, node: int) -> float:
        """Bytes of gradients of ``node`` that may be received at another node, or only in part."""
        return self._later[node]

    def read(self, node: int, unit: int) -> float:
        """Bytes of the values that ``node`` reads in its forward."""
        values = self._costs.values
        read = (v for v in self._users[node] if 0 <= values[v].producer != node)
        return sum(self._nbytes(v, unit) for v in read)

    def saved(self, node: int, unit: int) -> tuple[_Saved, _Saved, float]:
        """Bytes that ``node`` saves, counted in two ways, and how many of them may be missing.

        The first counts values that no earlier node of the unit saves, the second values that no earlier
        node of the model saves. The third is by how much the values that only this node saves may be smaller,
        if they are received.
        """
        here, first = [0.0, 0.0], [0.0, 0.0]
        less = 0.0
        unit_of = self._model.unit_of
        for index in self._savers[node]:
            savers, nbytes = self._costs.values[index].savers, self._nbytes(index, unit)
            single = len(savers) == 1
            if single:
                less += self._costs.values[index].nbytes - nbytes
            if node == min(s for s in savers if unit_of[s] == unit):
                here[single] += nbytes
            if node == min(savers):
                first[single] += nbytes
        mine = _Saved(shared=here[0], single=here[1])
        return mine, _Saved(shared=first[0], single=first[1]), less

    def _nbytes(self, index: int, unit: int) -> float:
        value = self._costs.values[index]
        whole = value.producer < 0 or self._model.unit_of[value.producer] == unit
        return float(value.nbytes if whole else self._least[index])


def _least_copies(costs: CostTable) -> list[int]:
    """For each value, the bytes of the smallest result through which a stage can receive it."""
    least = [value.nbytes for value in costs.values]
    for stored_in, node in zip(costs.results, costs.nodes, strict=False):
        for index in stored_in:
            least[index] = min(least[index], node.output_nbytes if len(stored_in) == 1 else 0)
    return least
