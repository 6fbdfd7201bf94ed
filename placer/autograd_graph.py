"""Walks autograd's graph."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from placer._torch import without_torch_function
from placer.operands import tensors_of_tree


def nodes_of(value: Any) -> list[Node]:
    """The autograd nodes that made the tensors in ``value``, which may be any pytree; leaves have none."""
    with without_torch_function():  # otherwise torch-function modes would see every access
        made_by = map(_maker, tensors_of_tree(value))
        return [node for node in made_by if node is not None]


def _maker(tensor: Tensor) -> Node | None:
    try:
        return tensor.grad_fn
    except RuntimeError:
        # It is a view that was made under no_grad and written since, which torch does not differentiate.
        return None


def nodes_behind(start: Iterable[Node], *, stops: Container[Node] = ()) -> list[Node]:
    """The nodes of ``start``, and all nodes that gradients reach from them without passing ``stops``."""
    stack = [node for node in dict.fromkeys(start) if node not in stops]
    seen = set(stack)
    found = []
    while stack:
        node = stack.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen and following not in stops:
                seen.add(following)
                stack.append(following)
    return found


def leaf_of(node: Node) -> Tensor | None:
    """The leaf tensor whose gradient ``node`` accumulates; None for any other node."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) and leaf.is_leaf else None
