"""Put the operands of products and sums of sizes in the order of the graph.

Python code may multiply sizes in the order of a set of names, as einops does. That order differs between
processes, but every process must record the same graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

_COMMUTATIVE = (operator.mul, operator.add)  # exact for integers, in any order


def sort_operands(
    graph: fx.Graph, numbers: Mapping[fx.Node, Any], layer_of: Mapping[str, str]
) -> None:
    """Rewrite each chain of integer products, or sums, of one layer: numbers first, then nodes in order.

    ``numbers`` maps the nodes of sizes to their values. The nodes of a chain keep their places. Takes
    O(nodes) time.
    """
    index = {node: i for i, node in enumerate(graph.nodes)}
    absorbed: set[fx.Node] = set()
    for last in reversed(graph.nodes):
        if last in absorbed or not _is_integer(last, numbers) or last.target not in _COMMUTATIVE:
            continue
        chain, operands = [last], []
        for node in chain:  # grows
            for value in node.args:
                if _continues(value, last, numbers, layer_of):
                    chain.append(value)
                else:
                    operands.append(value)
        absorbed.update(chain)
        chain.sort(key=index.__getitem__)
        operands.sort(key=lambda x: (1, index[x]) if isinstance(x, fx.Node) else (0, x))
        if isinstance(operands[-1], fx.Node) and index[operands[-1]] > index[chain[0]]:
            continue  # it is made later than the chain begins
        total = operands[0]
        for node, operand in zip(chain, operands[1:], strict=True):
            node.args = total, operand
            total = node


def _continues(
    value: Any, last: fx.Node, numbers: Mapping[fx.Node, Any], layer_of: Mapping[str, str]
) -> bool:
    """Whether ``value`` is an operand that is part of the chain of ``last``."""
    return (
        isinstance(value, fx.Node)
        and value.target is last.target
        and len(value.users) == 1
        and _is_integer(value, numbers)
        and layer_of[value.name] == layer_of[last.name]
    )


def _is_integer(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> bool:
    """Whether the node computes an integer from integers."""
    return isinstance(numbers.get(node), int) and all(
        isinstance(numbers.get(x) if isinstance(x, fx.Node) else x, int) for x in node.args
    )
