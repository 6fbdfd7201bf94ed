"""Names of a model's parameters and buffers, including all names of tied ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn


def named_state(model: nn.Module, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Every parameter, then every buffer, with its name; a tied tensor appears under each of its names."""
    return [
        *model.named_parameters(prefix=prefix, remove_duplicate=False),
        *model.named_buffers(prefix=prefix, remove_duplicate=False),
    ]


def first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of the same tensor.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> first_names(tied)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_state(model)}


def state_of(
    node: fx.Node, modules: Mapping[str, nn.Module], constants: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names of the parameters and buffers that ``node`` reads; ``modules`` are the model's, by path."""
    if node.op not in ("get_attr", "call_module") or node.name in constants:
        return ()
    path = str(node.target)
    if path not in modules:
        return (path,)
    return tuple(name for name, _ in named_state(modules[path], prefix=path))
