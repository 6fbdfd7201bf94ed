"""Names of a model's parameters and buffers, including all names of tied ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer._torch import storage_key


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


class StateNames:
    """The names of tensors by their memory, of which several may have a part."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._at: dict[int, list[tuple[str, range]]] = defaultdict(list)
        for name, tensor in tensors:
            if tensor.layout == torch.strided:
                self._at[storage_key(tensor)].append((name, _elements(tensor)))

    def of(self, tensor: Tensor) -> list[str]:
        """The names of all that may share memory with ``tensor``."""
        if tensor.layout != torch.strided:
            return []
        known, own = self._at.get(storage_key(tensor), ()), _elements(tensor)
        return [name for name, other in known if own.start < other.stop and other.start < own.stop]


def _elements(tensor: Tensor) -> range:
    """From the first to the last element of its storage."""
    if 0 in tensor.shape:
        return range(0)
    first, steps = tensor.storage_offset(), zip(tensor.shape, tensor.stride(), strict=True)
    return range(first, first + 1 + sum((size - 1) * stride for size, stride in steps))


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
