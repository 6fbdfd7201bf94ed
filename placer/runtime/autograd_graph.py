"""Walks over autograd's graph."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import Tensor
from torch.autograd.graph import Node


def nodes_behind(start: Iterable[Node], *, stops: Container[Node] = ()) -> list[Node]:
    """The nodes of ``start`` and all that gradients reach from there without passing ``stops``."""
    waiting = [node for node in dict.fromkeys(start) if node not in stops]
    seen = set(waiting)
    found = []
    while waiting:
        node = waiting.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in stops:
                seen.add(following)
                waiting.append(following)
    return found


def leaf_of(node: Node) -> Tensor | None:
    """The leaf that ``node`` accumulates gradients into; None for any other node."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) and leaf.is_leaf else None
