"""Runs a stage's backward in two halves, first for its inputs, later for its weights (zero bubble).

Both halves use the same autograd graph. Call the paths from the stage's outputs to its received values
the main path. A weight joins it at one node, and gets its gradient through that node. The first half
runs along the main path and keeps the gradients that arrive at such nodes; the second half starts from
them::

    received ──► conv ──► relu ──► out      first half: relu, and conv for its input
                  ▲                         kept: the gradient that arrived at conv
    weight ───────┘                         second half: conv for its weight

Two kinds of stages cannot be split, and run their whole backward in the first half: if an output does
not depend on any received value, its weights do not join the main path; and if a weight joins it at two
nodes, what lies between them would run twice. Stages that recompute are in no plan with such a schedule
(`placer.partition.types.PlanningOptions.with_whole_backwards`).

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from placer.autograd_graph import leaf_of

Received = tuple[GradientEdge, Callable[[Tensor], None]]


class SplitBackward:
    """The backward of one micro-batch through one stage.

    It starts from ``roots`` with ``gradients``, one for each (None for a scalar root). ``received`` has
    the edge of every value that the stage received, each with a function to call with its gradient.
    """

    def __init__(
        self,
        roots: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor | None],
        received: Sequence[Received],
    ) -> None:
        self._roots = list(roots)
        self._gradients = list(gradients)
        self._received = list(received)
        # For the second half: edges to start from, their gradients, and the weights behind them.
        self._weights: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = []

    def run_inputs(self) -> None:
        """Compute and deliver the gradients of received values.

        Also accumulates those of all weights, if the backward cannot be split.
        """
        roots, gradients = self._roots, self._gradients
        received = self._received
        self._roots, self._gradients, self._received = [], [], []
        if not roots:
            return
        starts = [
            root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots
        ]
        meetings = _find_meetings(starts, [edge for edge, _ in received])
        if meetings is None:
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
            return
        edges = [edge for edge, _ in received]
        kept = [edge for node_edges, _ in meetings for edge in node_edges]
        found = iter(
            torch.autograd.grad(
                roots,  # type: ignore[arg-type]
                [*edges, *kept],
                gradients,
                retain_graph=True,
                allow_unused=True,
            )
        )
        for _, deliver in received:
            gradient = next(found)
            if gradient is not None:
                deliver(gradient)
        for node_edges, weights in meetings:
            arrived = [
                (edge, gradient)
                for edge, gradient in zip(node_edges, found, strict=False)
                if gradient is not None
            ]
            if arrived and weights:
                some_edges, some_gradients = zip(*arrived, strict=True)
                self._weights.append((list(some_edges), list(some_gradients), weights))

    def run_weights(self) -> None:
        """Accumulate the gradients of the weights, unless `run_inputs` has done so."""
        while self._weights:
            edges, gradients, weights = self._weights.pop()
            torch.autograd.backward(edges, gradients, inputs=weights)


def _find_meetings(
    starts: Sequence[GradientEdge], received: Iterable[GradientEdge]
) -> list[tuple[list[GradientEdge], list[Tensor]]] | None:
    """Nodes where weights join the main path from ``starts`` to ``received``.

    For each the edges into the node, and its weights. None if the backward cannot be split. Sets of
    weights are bit masks, so this takes O(nodes * weights / 64) time.
    """
    ends = frozenset(edge.node for edge in received)
    order = _topological((start.node for start in starts), ends=ends)
    onward = set(ends)  # nodes on the main path
    for node in order:
        if any(following in onward for following, _ in node.next_functions):
            onward.add(node)
    if not all(start.node in onward for start in starts):
        return None
    leaves = [node for node in order if leaf_of(node) is not None]
    bit = {node: 1 << i for i, node in enumerate(leaves)}
    behind: dict[Node, int] = {}  # for a node off the main path: the leaves that it leads to
    met: dict[Node, int] = {}  # for a node on it: the leaves that join there
    seen = 0
    for node in order:
        found = bit.get(node, 0)
        for following, _ in node.next_functions if node not in ends else ():
            if following is not None and following not in onward:
                found |= behind[following]
        if node not in onward:
            behind[node] = found
        elif found & seen:
            return None
        elif found:
            met[node] = found
            seen |= found
    entries: dict[Node | None, set[int]] = {node: set() for node in met}
    arrivals: list[tuple[Node | None, int]] = [(s.node, s.output_nr) for s in starts]
    arrivals += [pair for node in order for pair in node.next_functions if node not in ends]
    for following, number in arrivals:
        if following in entries:
            entries[following].add(number)
    return [
        (
            [GradientEdge(node, number) for number in sorted(entries[node])],
            [leaf_of(leaf) for leaf in leaves if bit[leaf] & mask],  # type: ignore[misc]
        )
        for node, mask in met.items()
    ]


def _topological(roots: Iterable[Node], *, ends: Container[Node]) -> list[Node]:
    """All nodes from ``roots`` to leaves and ``ends``; each comes after its ``next_functions``."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if node not in ends:
                stack += [(n, False) for n, _ in node.next_functions if n is not None]
    return order
