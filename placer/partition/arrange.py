"""What a chain of stages is made of: where it may be cut, and which device comes when."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import networkx as nx
import numpy as np

from placer.cost import CostTable
from placer.partition.solver.problem import Vector
from placer.partition.types import DeviceSlot

_MOST_CUTS = 400  # more candidate boundaries than this are thinned to the cheapest ones
_MOST_CHAINS = 64  # device orders that are tried when devices differ or are only partly pinned


def unit_pins(units: nx.DiGraph, pins: Mapping[int, str]) -> dict[int, str]:
    """Unit -> device; a unit whose nodes are pinned to several goes to that of its first node."""
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
    """Positions of nodes between units where a stage may end, 0 and the last included.

    Boundaries between pins are always among them, and those after ``kept`` units of the order.
    """
    ends = list(itertools.accumulate(len(units.nodes[u]["nodes"]) for u in order))
    boundaries = ends[:-1]
    if len(boundaries) > _MOST_CUTS:
        chosen = _cheapest(boundaries, _crossing_bytes(units, order, costs))
        chosen |= _pin_boundaries(units, order, ends, pin_of)
        chosen.update(ends[count - 1] for count in kept if 0 < count < len(order))
        boundaries = sorted(chosen)
    return [0, *boundaries, ends[-1] if ends else 0]  # a model may have no operations


def is_thinned(order: Sequence[int]) -> bool:
    """Are only some of the boundaries of ``order`` among its candidates?"""
    return len(order) - 1 > _MOST_CUTS


def _crossing_bytes(units: nx.DiGraph, order: Sequence[int], costs: CostTable) -> Vector:
    """Per position of a node the bytes that cross a boundary before it, forward."""
    place = {n: i for i, n in enumerate(n for u in order for n in units.nodes[u]["nodes"])}
    steps = np.zeros(len(place) + 2)
    for node, readers in enumerate(costs.readers):
        if readers:
            last = max(place.get(r, len(place)) for r in readers)
            steps[place[node] + 1] += costs.nodes[node].output_nbytes
            steps[last + 1] -= costs.nodes[node].output_nbytes
    return np.cumsum(steps)


def _cheapest(boundaries: Sequence[int], crossing: Vector) -> set[int]:
    """Of every run of neighbouring ``boundaries`` the one that the fewest bytes cross."""
    length = -(-len(boundaries) // _MOST_CUTS)
    runs = (boundaries[i : i + length] for i in range(0, len(boundaries), length))
    return {min(run, key=lambda b: (crossing[b], b)) for run in runs}


def _pin_boundaries(
    units: nx.DiGraph, order: Sequence[int], ends: Sequence[int], pin_of: Mapping[int, str]
) -> set[int]:
    """Where a unit that is pinned to a device ends, and the next one that is pinned to another begins."""
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
    """Devices in the order of their stages, so that they follow the pins (of nodes, in order).

    A device comes again where the pins ask for it; free devices are put in everywhere they could
    go, 64 chains at most.
    """
    by_name = {slot.name: slot for slot in devices}
    runs = [name for name, _ in itertools.groupby(p for p in pinned if p is not None)]
    fixed = [by_name[name] for name in runs]
    free = [slot for slot in devices if slot.name not in runs]
    kinds = {(s.kind.name, s.budget, s.reserve) for s in free}
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
            if tried >= _MOST_CHAINS:
                return
