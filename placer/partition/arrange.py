"""Finds the cuts at which stages may end along an order, and the orders in which devices may come."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import networkx as nx
import numpy as np

from placer.cost import CostTable
from placer.partition.solver.problem import Vector
from placer.partition.types import DeviceSlot

_MAX_CUTS = 400  # longer orders have only the cuts that the fewest bytes cross
_MAX_CHAINS = 64  # orders of devices to try, if devices differ or have pinned nodes


def unit_pins(units: nx.DiGraph, pins: Mapping[int, str]) -> dict[int, str]:
    """The device that each unit is pinned to, which is that of its first pinned node."""
    found: dict[int, str] = {}
    for unit, nodes in units.nodes(data="nodes"):
        devices = [pins[i] for i in nodes if i in pins]
        if devices:
            found[unit] = devices[0]
    return found


def candidate_cuts(
    units: nx.DiGraph,
    order: Sequence[int],
    costs: CostTable,
    pin_of: Mapping[int, str],
    kept: Collection[int] = (),
) -> list[int]:
    """Cuts: positions of nodes, between units, at which stages may begin and end; includes both ends.

    If there are too many, only some are returned: always those between units with different pins and those
    after ``kept`` units, and of the others those that few bytes cross.
    """
    ends = list(itertools.accumulate(len(units.nodes[u]["nodes"]) for u in order))
    boundaries = ends[:-1]
    if len(boundaries) > _MAX_CUTS:
        chosen = _cheapest(boundaries, _crossing_bytes(units, order, costs))
        chosen |= _pin_boundaries(units, order, ends, pin_of)
        chosen.update(ends[count - 1] for count in kept if 0 < count < len(order))
        boundaries = sorted(chosen)
    return [0, *boundaries, ends[-1] if ends else 0]  # a model may have no operations


def is_thinned(order: Sequence[int]) -> bool:
    """Whether `candidate_cuts` leaves out some cuts of ``order``."""
    return len(order) - 1 > _MAX_CUTS


def _crossing_bytes(units: nx.DiGraph, order: Sequence[int], costs: CostTable) -> Vector:
    """For each position of a node, the bytes that cross a cut before it in forward."""
    position = {n: i for i, n in enumerate(n for u in order for n in units.nodes[u]["nodes"])}
    steps = np.zeros(len(position) + 2)
    for node, readers in enumerate(costs.readers):
        if readers:
            last = max(position.get(r, len(position)) for r in readers)
            steps[position[node] + 1] += costs.nodes[node].output_nbytes
            steps[last + 1] -= costs.nodes[node].output_nbytes
    return np.cumsum(steps)


def _cheapest(boundaries: Sequence[int], crossing: Vector) -> set[int]:
    """The boundary that the fewest bytes cross, of every run of neighbouring ``boundaries``."""
    length = -(-len(boundaries) // _MAX_CUTS)
    runs = (boundaries[i : i + length] for i in range(0, len(boundaries), length))
    return {min(run, key=lambda b: (crossing[b], b)) for run in runs}


def _pin_boundaries(
    units: nx.DiGraph, order: Sequence[int], ends: Sequence[int], pin_of: Mapping[int, str]
) -> set[int]:
    """The end of each unit with a pin, and the start of the next one with a pin, if the pins differ."""
    found: set[int] = set()
    previous: tuple[str, int] | None = None
    for unit, end in zip(order, ends, strict=True):
        pin = pin_of.get(unit)
        if pin is not None:
            if previous is not None and previous[0] != pin:
                found |= {previous[1], end - len(units.nodes[unit]["nodes"])}
            previous = pin, end
    return found


def device_chains(
    devices: Sequence[DeviceSlot], pinned: Sequence[str | None]
) -> Iterator[tuple[DeviceSlot, ...]]:
    """Chains of devices, in the order of their stages, that agree with the pins of nodes along an order.

    A device is repeated if its pins require it. Devices without pins are tried at every position between
    the others. At most 64 chains.
    """
    by_name = {slot.name: slot for slot in devices}
    runs = [name for name, _ in itertools.groupby(p for p in pinned if p is not None)]
    fixed = [by_name[name] for name in runs]
    free = [slot for slot in devices if slot.name not in runs]
    kinds = {(s.kind.name, s.budget, s.kept) for s in free}
    arrangements = itertools.permutations(free) if len(kinds) > 1 else iter([tuple(free)])
    tried = 0
    for arrangement in arrangements:
        for gaps in itertools.combinations_with_replacement(range(len(fixed) + 1), len(free)):
            chain: list[DeviceSlot] = []
            for i in range(len(fixed) + 1):
                chain += [s for s, gap in zip(arrangement, gaps, strict=True) if gap == i]
                chain += fixed[i : i + 1]
            yield tuple(chain)
            tried += 1
            if tried >= _MAX_CHAINS:
                return
