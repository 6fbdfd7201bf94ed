"""Makes nodes of graphs."""

from __future__ import annotations

from typing import Any

from torch import fx


def new_node(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None
) -> fx.Node:
    """``graph.create_node(op, target, args, kwargs, name)``, in half the time.

    Arguments are set after the node has been made: torch 2.15 looks through those it makes a node with for
    symbolic sizes, which graphs here have none of.
    """
    node = graph.create_node(op, target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node
