"""No placement has a lower largest peak: bounds from what a unit, and a group of units, must hold.

A device that runs a set D of units, in one stage or in several, holds at the moment when the
backward of a node i of D runs, with the bytes of `placer.partition.stage_cost.score`,

    static(D)                        parameters, buffers, optimizer state: always
  + saved(j), j in D before i        their forward has ended, and their backward has not begun
  + gradients(j), j in D behind i    their backward has ended
  + alone(i)                         what i saved for itself, what came in, what its backward makes

Whatever the order of the stages is, an ancestor of i is before i and a descendant behind it; of any
other unit the lesser of both counts. From this follow, for N devices and all placements on them,

1. the device of a unit holds at least what the unit holds at the worst of its own moments: those of
   its backwards, of its forwards with what they read, and its optimizer step;
2. let H be some units, excess(i) what unit i holds at the worst of its backwards above static(i) +
   saved(i), and w(j) = static(j) + saved(j), or the least that j can come to where j is not before
   all of H. A device that has some of H holds at least w of all its units + excess of the last of H
   that it has (in program order: no other one of them is behind it), any other device at least w.
   So if h devices have some of H, with T the largest peak,

       N T >= w(all) + excess(last of H) + the h - 1 least excesses      (all devices added up)
       h T >= w(H) + h times the least excess                            (those that have some of H)

   and T is at least the least over h of the larger of both. H are the units of the largest
   excesses from some place of the program on; all of these are tried.

The first is the bound where one operation is large for the number of devices, the second where
there are few devices. With micro-batches in flight saved(j) counts for each that waits. What regions
recompute or offload counts nowhere but in alone(i).
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
from placer.partition.stage_cost.score import optimizer_bytes
from placer.partition.stage_cost.tables import node_transients
from placer.partition.types import DeviceSlot, PlanningOptions

_MOST_UNITS = 2_000  # of a graph whose groups of units are looked at: all pairs are compared
_MOST_IN_GROUP, _MOST_STARTS = 64, 32

Bytes = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes per unit: what any stage holds that has it."""

    static: Bytes
    saved: Bytes  # between the forward and the backward of its nodes; each value at one saver
    gradients: Bytes  # of its own parameters, from its backward on
    excess: Bytes  # of the worst of its backwards, above static + saved
    alone: Bytes  # the worst of all its moments, with nothing else in the stage


def least_peak(
    model: ModelUnits,
    costs: CostTable,
    devices: Sequence[DeviceSlot],
    num_stages: int,
    options: PlanningOptions,
) -> float:
    """No placement on ``devices`` has a lower largest peak, in the unit of `StageCosts.peaks`.

    ``num_stages``: of the longest chain tried, where a stage may be as good as a device of its own.
    O(nodes + units^2 / 8 + tried groups x units) time; of more than 2,000 units no groups are tried.
    """
    held = unit_bytes(model, costs, options, [slot.name for slot in devices])
    nbytes = float(held.alone.max(initial=0.0))
    if options.training and len(model.order) <= _MOST_UNITS:
        waiting = (in_flight_at(options, num_stages, q) for q in range(num_stages))
        others = min(count.first_backward for count in waiting)
        nbytes = max(nbytes, _least_of_groups(held, model.edges, num_stages, others))
    return min(peak_share(nbytes, slot, reference_bytes(devices)) for slot in devices)


def _least_of_groups(
    held: UnitBytes, edges: Iterable[tuple[int, int]], devices: int, others: float
) -> float:
    """The second bound; ``others`` micro-batches wait at any stage while the first backward runs."""
    count = len(held.static)
    before = _ancestors(count, edges)
    full = held.static + (1 + others) * held.saved
    part = full - held.saved + np.minimum(held.saved, held.gradients)
    least = 0.0
    large = np.argsort(-held.excess, kind="stable")
    for start in np.unique(np.linspace(0, count - 1, _MOST_STARTS).astype(np.int64)):
        group = np.zeros(count, dtype=bool)
        is_before = np.ones(count, dtype=bool)  # all of the group, or of it what comes later
        chosen = large[(large >= start) & (held.excess[large] > 0)][:_MOST_IN_GROUP]
        for unit in chosen:
            later = np.flatnonzero(group[unit:]) + unit
            outside = ~group
            outside[:unit] = True
            is_before &= before[unit] | ~outside
            is_before[unit] = bool(before[later, unit].all())
            group[unit] = True
            bytes_of = np.where(is_before, full, part)
            excess = np.sort(held.excess[group])
            last = held.excess[np.flatnonzero(group)[-1]]
            rest = np.delete(excess, np.searchsorted(excess, last))
            hosts = np.arange(1, min(devices, len(excess)) + 1)
            added = last + np.concatenate([[0.0], np.cumsum(rest)])[: len(hosts)]
            spread = (bytes_of.sum() + added) / devices
            packed = bytes_of[group].sum() / hosts + excess[0]
            least = max(least, float(np.maximum(spread, packed).min()))
    return least


def _ancestors(count: int, edges: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """``[u, v]``: v comes before u in every order; units are numbered in one."""
    before = np.zeros((count, count), dtype=bool)
    for a, b in sorted(edges, key=lambda edge: edge[1]):
        if b < count:
            before[b] |= before[a]
            before[b, a] = True
    return before


def unit_bytes(
    model: ModelUnits, costs: CostTable, options: PlanningOptions, devices: Sequence[str]
) -> UnitBytes:
    """What the units of ``model`` hold, on any of ``devices`` (names); O(nodes + uses)."""
    count = len(model.order)
    state = _state_bytes(model, costs, options)
    saved, excess, alone = np.zeros(count), np.zeros(count), state.copies.copy()
    if options.training:
        alone += state.gradients + _updating(state, options, devices)
    nodes_of: list[list[int]] = [[] for _ in range(count)]
    for node in range(len(costs.names)):
        nodes_of[int(model.unit_of[node])].append(node)
    values = _Values(model, costs)
    for unit, nodes in enumerate(nodes_of):
        moments = []
        if options.microbatches == 1:  # a smaller last one may be the only one in forward
            moments.append(_most_in_forward(costs, values, unit, nodes))
        if options.training:
            held = _held_in_backward(costs, values, unit, nodes, state.own[unit])
            saved[unit], excess[unit] = held.saved, max(0.0, held.most - held.saved)
            moments.append(held.most_alone)
        alone[unit] = max([alone[unit], *(state.copies[unit] + nbytes for nbytes in moments)])
    return UnitBytes(
        static=state.static, saved=saved, gradients=state.gradients, excess=excess, alone=alone
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateBytes:
    """Bytes per unit of parameters, buffers and the optimizer's state."""

    copies: Bytes  # of all that it reads: every stage that has it has them
    static: Bytes  # each at one of the units that read it
    gradients: Bytes  # of parameters that no other unit reads
    own: list[list[tuple[int, int]]]  # of each of these, its first reader and bytes


def _state_bytes(model: ModelUnits, costs: CostTable, options: PlanningOptions) -> _StateBytes:
    count = len(model.order)
    copies, static, gradients = np.zeros(count), np.zeros(count), np.zeros(count)
    own: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    state = optimizer_bytes(options.optimizer).state
    for names_of in (costs.parameters_of, costs.buffers_of):
        uses: dict[str, list[int]] = defaultdict(list)
        for node, names in enumerate(names_of):
            for name in {costs.alias_of[name] for name in names}:
                uses[name].append(node)
        for name, nodes in uses.items():
            units, nbytes = {int(model.unit_of[i]) for i in nodes}, costs.state_nbytes[name]
            for unit in units:
                copies[unit] += nbytes
            static[min(units)] += nbytes
            if options.training and name in costs.trained and len(units) == 1:
                (unit,) = units
                static[unit] += state * nbytes
                copies[unit] += state * nbytes
                gradients[unit] += nbytes
                own[unit].append((min(nodes), nbytes))
    return _StateBytes(copies=copies, static=static, gradients=gradients, own=own)


def _updating(state: _StateBytes, options: PlanningOptions, devices: Sequence[str]) -> Bytes:
    """Per unit what the optimizer makes while its parameters change, on the best of the devices."""
    largest = np.array([max((nbytes for _, nbytes in own), default=0) for own in state.own])
    optimizers = [optimizer_on(options, [name]) for name in devices]
    # `IntervalTables.updating` is twice the largest.
    steps = [how.together * state.gradients + 2 * how.each * largest for how in optimizers]
    least: Bytes = np.min(steps, axis=0)
    return least


def _most_in_forward(costs: CostTable, values: _Values, unit: int, nodes: Sequence[int]) -> float:
    """Bytes besides the state at the worst of the forwards of a unit's nodes."""
    forward = (node_transients(costs, node)[0] + values.read(node, unit) for node in nodes)
    return max(forward, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldInBackward:
    """Bytes besides the state, from a unit's forward to its backward, and at the worst moment of it."""

    saved: float  # each value at its first saver of all units
    most: float  # with values so counted
    most_alone: float  # with all that the unit saves


def _held_in_backward(
    costs: CostTable,
    values: _Values,
    unit: int,
    nodes: Sequence[int],
    own: Sequence[tuple[int, int]],
) -> _HeldInBackward:
    kept_so_far, saved_so_far = 0.0, 0.0  # all that is saved here; what is counted here
    most, most_alone = 0.0, 0.0
    for node in nodes:
        mine, counted, less = values.saved(node, unit)
        ended = sum(nbytes for first, nbytes in own if first > node)
        moment = max(0.0, node_transients(costs, node)[1] - less - values.later(node)) + ended
        kept_so_far += mine.shared
        saved_so_far += counted.shared
        most_alone = max(most_alone, kept_so_far + moment)
        most = max(most, saved_so_far + moment)
        kept_so_far += mine.single  # its own column has it in its transient
        saved_so_far += counted.single
    return _HeldInBackward(saved=saved_so_far, most=most, most_alone=most_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """Bytes that a node saves: ``shared`` with other nodes, and for itself alone."""

    shared: float = 0.0
    single: float = 0.0


class _Values:
    """What nodes read and save, at the least: where a value is received, parts of it may be."""

    def __init__(self, model: ModelUnits, costs: CostTable) -> None:
        self._model, self._costs = model, costs
        self._least = _least_copies(costs)
        self._users: dict[int, list[int]] = defaultdict(list)
        self._savers: dict[int, list[int]] = defaultdict(list)
        for index, value in enumerate(costs.values):
            nodes = {*value.users, *value.savers, *([value.producer] * (value.producer >= 0))}
            if costs.keys and any(costs.keys[i] for i in nodes if i < len(costs.keys)):
                continue  # a region may recompute it, or have it on the host
            for node in value.users:
                self._users[node].append(index)
            for node in value.savers:
                self._savers[node].append(index)
        self._later: dict[int, float] = defaultdict(float)
        for gradient in costs.gradients:
            apart = gradient.home != gradient.target
            self._later[gradient.target] += gradient.nbytes if apart else gradient.surplus

    def later(self, node: int) -> float:
        """Of the gradients that come in at ``node``, what may come somewhere else, or not whole."""
        return self._later[node]

    def read(self, node: int, unit: int) -> float:
        """Bytes that are there while the forward of ``node`` runs, because it reads them."""
        values = self._costs.values
        read = (v for v in self._users[node] if 0 <= values[v].producer != node)
        return sum(self._nbytes(v, unit) for v in read)

    def saved(self, node: int, unit: int) -> tuple[_Saved, _Saved, float]:
        """What ``node`` is the first of its unit to save, what it is the first of all to save, and
        how much less than a whole its own savings may be."""
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
    """Per value the bytes of the smallest result that a stage can receive it by."""
    least = [value.nbytes for value in costs.values]
    for held, nbytes in zip(costs.results, costs.nodes, strict=False):
        for index in held:
            least[index] = min(least[index], nbytes.output_nbytes if len(held) == 1 else 0)
    return least
