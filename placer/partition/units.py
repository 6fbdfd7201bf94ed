"""Groups nodes that must be on one stage into units, and makes topological orders of the units."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping

import networkx as nx

from placer.program import SELECTS, Program
from placer.space import CutWhole, GatherParts

_SEED = 20_260_101


def unit_graph(program: Program) -> nx.DiGraph:
    """The graph of units of ``program``.

    A vertex is the position of the unit's first node; its attribute ``nodes`` has the positions of all its
    nodes. These are put into one unit: nodes that share memory that is written (``program.colocated``); a
    node that returns several values and the calls that select them (`placer.program.SELECTS`); a parameter
    or constant and its first reader; in space, the cut of an input and its first reader, and a result and
    its gather. Units with random operations depend on each other in program order.
    Units on a cycle are merged (the condensation of the graph). Vertices and edges are sorted.
    """
    position = {name: i for i, name in enumerate(program.order)}
    joined: nx.Graph = nx.Graph()
    joined.add_nodes_from(position.values())
    depends: list[tuple[int, int]] = []
    for node in program.graph.nodes:
        if node.name not in position:
            continue
        here = position[node.name]
        readers = [position[user.name] for user in node.users if user.name in position]
        depends += [(here, reader) for reader in readers]
        cuts_input = isinstance(node.target, CutWhole) and node.args[0].op == "placeholder"
        if readers and (node.op == "get_attr" or cuts_input):
            joined.add_edge(here, min(readers))
        if isinstance(node.target, GatherParts) and not node.target.reason:
            joined.add_edge(here, position[node.args[0].name])
        for user in node.users:
            if user.op == "call_function" and user.target in SELECTS:
                joined.add_edge(here, position[user.name])
    depends += itertools.pairwise(i for i, each in enumerate(program.nodes.values()) if each.draws)
    for group in program.colocated:
        nx.add_path(joined, [position[name] for name in group])
    unit_of = {i: min(group) for group in nx.connected_components(joined) for i in group}
    quotient: nx.DiGraph = nx.DiGraph()
    quotient.add_nodes_from(unit_of.values())
    quotient.add_edges_from(
        (unit_of[a], unit_of[b]) for a, b in depends if unit_of[a] != unit_of[b]
    )
    merged = nx.condensation(quotient)
    members: dict[int, list[int]] = {}
    for i, unit in unit_of.items():
        members.setdefault(merged.graph["mapping"][unit], []).append(i)
    graph: nx.DiGraph = nx.DiGraph()
    names = {vertex: min(nodes) for vertex, nodes in members.items()}
    for vertex in sorted(names, key=lambda v: names[v]):
        graph.add_node(names[vertex], nodes=tuple(sorted(members[vertex])))
    graph.add_edges_from(sorted((names[a], names[b]) for a, b in merged.edges))
    return graph


def program_order(units: nx.DiGraph) -> list[int]:
    """The topological order of units that is nearest to program order."""
    return list(nx.lexicographical_topological_sort(units))


def sampled_orders(units: nx.DiGraph, count: int) -> Iterator[list[int]]:
    """``count`` random topological orders, the same in every call. Takes O(n) time for each."""
    generator = random.Random(_SEED)
    return (random_order(units, generator) for _ in range(count))


def random_order(units: nx.DiGraph, generator: random.Random) -> list[int]:
    """A random topological order, by Kahn's algorithm: every ready unit is equally likely to be the next."""
    # For each unit, predecessors that are not in the order yet
    missing = dict(units.in_degree())
    ready = [unit for unit in units if not missing[unit]]
    order: list[int] = []
    while ready:
        order.append(ready.pop(generator.randrange(len(ready))))
        for reader in sorted(units.successors(order[-1])):
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return order


def grouped_order(units: nx.DiGraph, pin_of: Mapping[int, str]) -> list[int]:
    """A topological order with few changes between units that are pinned to different devices.

    This is Kahn's algorithm with units of the current device first, then those without a pin. It is greedy
    and takes O(n log n) time. It gives fewer stages if branches with different pins alternate in the
    program.
    """
    missing = dict(units.in_degree())
    ready: dict[str | None, list[int]] = {}

    def offer(vertices: Iterable[int]) -> None:
        for vertex in vertices:
            heapq.heappush(ready.setdefault(pin_of.get(vertex), []), vertex)

    offer(v for v, degree in missing.items() if degree == 0)
    order: list[int] = []
    current: str | None = None
    while any(ready.values()):
        free = [pin for pin in (current, None) if ready.get(pin)]
        pin = min(free or (p for p in ready if ready[p]), key=lambda p: ready[p][0])
        vertex = heapq.heappop(ready[pin])
        current = pin if pin is not None else current
        order.append(vertex)
        done = []
        for reader in units.successors(vertex):
            missing[reader] -= 1
            if missing[reader] == 0:
                done.append(reader)
        offer(done)
    return order
