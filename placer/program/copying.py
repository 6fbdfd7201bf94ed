"""Deep copies of modules, also where an earlier forward left tensors in attributes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from placer.operands import tensors_of_tree


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of ``model``; ``memo`` maps ids of its tensors to what replaces them in the copy.

    ``copy.deepcopy`` refuses tensors that a forward computed (the older ``torch.nn.utils.weight_norm``
    keeps such a weight) and reads the data of fake ones. The copy gets clones of both.
    """
    known = dict(memo or {}) | _empty_containers(model)
    for tensor in tensors_of(model):
        fake = isinstance(tensor, FakeTensor) and not isinstance(tensor, nn.Parameter)
        if (fake or tensor.grad_fn is not None) and id(tensor) not in known:
            known[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, known)


def _empty_containers(model: nn.Module) -> dict[int, Any]:
    """Copies of the empty containers of all modules, by id.

    Every module has a dozen, for hooks; ``copy.deepcopy`` would spend most of its time on them.
    """
    return {
        id(value): type(value)()
        for module in model.modules()
        for value in module.__dict__.values()
        if type(value) in (dict, OrderedDict, set) and not value
    }


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a module of ``model`` holds: parameters, buffers, attributes, lists of them."""
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers"):
                yield from (tensor for tensor in value.values() if tensor is not None)
            elif name != "_modules" and value is not None and type(value) is not bool:
                yield from tensors_of_tree(value)
