"""Finds the cuts at which stages along an order may end, and the possible orders of the devices."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import networkx as nx
import numpy as np

from placer.cost import CostTable
from placer.partition.solver.problem import Vector
from placer.partition.types import DeviceSlot

Members = Mapping[int, Sequence[int]]  # the nodes of each unit

_MAX_CUTS = 400  # in longer orders, only the cuts crossed by the fewest bytes are used
_MAX_CHAINS = 64  # how many orders of devices are tried, if devices differ or have pinned nodes


def unit_pins(units: nx.DiGraph, pins: Mapping[int, str], layers: Sequence[str]) -> dict[int, str]:
    """The device each unit is pinned to: the pin of its first pinned node, or of one in a layer inside that.

    So what a module does between its ``layers`` goes where they are, if both write the same memory.
    """
    found: dict[int, str] = {}
    for unit, nodes in units.nodes(data="nodes"):
        pinned = [i for i in nodes if i in pins]
        if pinned:
            chosen = pinned[0]
            for i in pinned:
                chosen = i if layers[i].startswith(f"{layers[chosen]}.") else chosen
            found[unit] = pins[chosen]
    return found


def candidate_cuts(
    units: nx.DiGraph,
    order: Sequence[int],
    costs: CostTable,
    pin_of: Mapping[int, str],
    kept: Collection[int] = (),
) -> list[int]:
    """The cuts at which stages may begin and end: positions between units, including both ends.

    If there are too many, only some are returned: all cuts between units with different pins, all cuts
    after a number of units in ``kept``, and of the others those crossed by few bytes.
    """
    members = dict(units.nodes(data="nodes"))
    ends = list(itertools.accumulate(len(members[u]) for u in order))
    boundaries = ends[:-1]
    if len(boundaries) > _MAX_CUTS:
        chosen = _cheapest(boundaries, _crossing_bytes(members, order, costs))
        chosen |= _pin_boundaries(members, order, ends, pin_of)
        chosen.update(ends[count - 1] for count in kept if 0 < count < len(order))
        boundaries = sorted(chosen)
    return [0, *boundaries, ends[-1] if ends else 0]  # a model may have no operations


def is_thinned(order: Sequence[int]) -> bool:
    """Whether `candidate_cuts` leaves out some cuts of ``order``."""
    return len(order) - 1 > _MAX_CUTS


def _crossing_bytes(members: Members, order: Sequence[int], costs: CostTable) -> Vector:
    """The bytes that cross a cut before each position in forward."""
    position = {n: i for i, n in enumerate(n for u in order for n in members[u])}
    steps = np.zeros(len(position) + 2)
    for node, readers in enumerate(costs.readers):
        if readers:
            last = max([position.get(r, len(position)) for r in readers])
            steps[position[node] + 1] += costs.nodes[node].output_nbytes
            steps[last + 1] -= costs.nodes[node].output_nbytes
    return np.cumsum(steps)


def _cheapest(boundaries: Sequence[int], crossing: Vector) -> set[int]:
    """From every run of neighbouring ``boundaries``, the one crossed by the fewest bytes."""
    length = -(-len(boundaries) // _MAX_CUTS)
    runs = (boundaries[i : i + length] for i in range(0, len(boundaries), length))
    return {min(run, key=lambda b: (crossing[b], b)) for run in runs}


def _pin_boundaries(
    members: Members, order: Sequence[int], ends: Sequence[int], pin_of: Mapping[int, str]
) -> set[int]:
    """The end of a pinned unit and the start of the next pinned unit, wherever their pins differ."""
    found: set[int] = set()
    previous: tuple[str, int] | None = None
    for unit, end in zip(order, ends, strict=True):
        pin = pin_of.get(unit)
        if pin is not None:
            if previous is not None and previous[0] != pin:
                found |= {previous[1], end - len(members[unit])}
            previous = pin, end
    return found


def device_chains(
    devices: Sequence[DeviceSlot], pinned: Sequence[str | None]
) -> Iterator[tuple[DeviceSlot, ...]]:
    """Yields orders of devices (one per stage) that agree with the pins of nodes along an order.

    A device is repeated if its pins require it. Devices without pins are tried at every position between the
    others. Devices that differ only in their names, or in what dry runs corrected, keep their order.
    Yields at most 64 orders.
    """
    by_name = {slot.name: slot for slot in devices}
    runs = [name for name, _ in itertools.groupby(p for p in pinned if p is not None)]
    fixed = [by_name[name] for name in runs]
    free = [slot for slot in devices if slot.name not in runs]
    tried = 0
    for arrangement in _arrangements(free):
        for gaps in itertools.combinations_with_replacement(range(len(fixed) + 1), len(free)):
            chain: list[DeviceSlot] = []
            for i in range(len(fixed) + 1):
                chain += [s for s, gap in zip(arrangement, gaps, strict=True) if gap == i]
                chain += fixed[i : i + 1]
            yield tuple(chain)
            tried += 1
            if tried >= _MAX_CHAINS:
                return


def _arrangements(slots: Sequence[DeviceSlot]) -> Iterator[tuple[DeviceSlot, ...]]:
    """Yields the orders of ``slots`` in which equal devices keep their order, in lexicographic order."""
    kinds = [(slot.kind.name, slot.budget, slot.context + slot.reserve) for slot in slots]
    order = list(range(len(slots)))
    following: int | None = -1
    while following is not None:
        yield tuple(slots[i] for i in order)
        following = None
        for at in reversed(range(len(order))):
            rest = sorted(order[at:])
            firsts = {kinds[i]: i for i in reversed(rest)}.values()
            following = min((i for i in firsts if i > order[at]), default=None)
            if following is not None:
                rest.remove(following)
                order[at:] = [following, *rest]
                break
