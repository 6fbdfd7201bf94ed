"""Units: groups of nodes that stay on one stage, and the graph between them."""

from __future__ import annotations

import heapq
import itertools
import operator
import random
from collections.abc import Iterable, Iterator, Mapping

import networkx as nx
from torch import fx

from placer.capture import Capture

_SEED = 20_260_101


def unit_graph(capture: Capture) -> nx.DiGraph:
    """The DAG of units of ``capture``; each vertex is its smallest node position, with ``nodes``.

    A unit joins what aliasing ties together (``capture.together``), a result with the ``getitem``
    calls that take it apart, and a parameter or constant with its first reader. Units that draw
    random numbers depend on each other in program order. Units that would depend on each other both
    ways become one (the condensation of the graph).
    """
    position = {name: i for i, name in enumerate(capture.order)}
    joined: nx.Graph = nx.Graph()
    joined.add_nodes_from(position.values())
    depends: list[tuple[int, int]] = []
    for node in capture.graph.nodes:
        if node.name not in position:
            continue
        here = position[node.name]
        readers = [position[user.name] for user in node.users if user.name in position]
        depends += [(here, reader) for reader in readers]
        if node.op == "get_attr" and readers:
            joined.add_edge(here, min(readers))
        for user in node.users:
            if _takes_apart(user):
                joined.add_edge(here, position[user.name])
    draws = [position[name] for name in capture.draws]
    depends += itertools.pairwise(draws)
    for group in capture.together:
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


def _takes_apart(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def program_order(units: nx.DiGraph) -> list[int]:
    """The topological order of units that is nearest to the program's own."""
    return list(nx.lexicographical_topological_sort(units))


def sampled_orders(units: nx.DiGraph, count: int) -> Iterator[list[int]]:
    """``count`` topological orders, each ready unit as likely next as any other; the same each time.

    Kahn's algorithm; O(n) each.
    """
    draw = random.Random(_SEED)
    for _ in range(count):
        waiting = dict(units.in_degree())
        ready = [unit for unit in units if not waiting[unit]]
        order: list[int] = []
        while ready:
            order.append(ready.pop(draw.randrange(len(ready))))
            for reader in sorted(units.successors(order[-1])):
                waiting[reader] -= 1
                if not waiting[reader]:
                    ready.append(reader)
        yield order


def grouped_order(units: nx.DiGraph, pin_of: Mapping[int, str]) -> list[int]:
    """A topological order that stays with a device as long as some unit pinned to it is ready.

    Greedy (Kahn's algorithm with the current device's units, then unpinned ones, first), O(n log n);
    it shortens the chain of stages when branches with different pins alternate in the program.
    """
    waiting = dict(units.in_degree())
    ready: dict[str | None, list[int]] = {}

    def offer(vertices: Iterable[int]) -> None:
        for vertex in vertices:
            heapq.heappush(ready.setdefault(pin_of.get(vertex), []), vertex)

    offer(v for v, degree in waiting.items() if degree == 0)
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
            waiting[reader] -= 1
            if waiting[reader] == 0:
                done.append(reader)
        offer(done)
    return order
