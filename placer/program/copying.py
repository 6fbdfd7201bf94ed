"""Deep copies of modules, even if an earlier forward left tensors in attributes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from placer.operands import tensors_of_tree


def copy_module(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of ``model``; ``memo`` maps ids of its tensors to their replacements in the copy.

    ``copy.deepcopy`` refuses tensors that a forward computed (the older ``torch.nn.utils.weight_norm`` keeps
    such a weight), and reads the data of fake tensors. This copy has clones of both. ``copy.deepcopy`` also
    leaves functions as they are; here, a hook with a part of ``model`` in its closure gets that part of the
    copy.
    """
    known = dict(memo or {}) | _empty_containers(model)
    for tensor in tensors_of(model):
        fake = isinstance(tensor, FakeTensor) and not isinstance(tensor, nn.Parameter)
        if (fake or tensor.grad_fn is not None) and id(tensor) not in known:
            known[id(tensor)] = tensor.detach().clone()
    copied = copy.deepcopy(model, known)
    rebind = _Rebinding(known)
    for module in copied.modules():
        for name, hooks in module.__dict__.items():
            if name.endswith("_hooks") and hooks:
                hooks.update({key: rebind(hook) for key, hook in hooks.items()})
    return copied


class _Rebinding:
    """Makes functions whose closures and defaults refer to copies; ``memo`` maps ids of objects to copies."""

    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo
        self._cells: dict[int, CellType] = {}  # several functions may share a cell

    def __call__(self, value: Any) -> Any:
        """The copy of ``value``, or ``value`` itself if neither it nor anything inside it was copied."""
        if not isinstance(value, FunctionType):
            return self._memo.get(id(value), value)
        cells = tuple(map(self._cell, value.__closure__ or ()))
        defaults = tuple(map(self, value.__defaults__ or ()))
        keywords = {name: self(default) for name, default in (value.__kwdefaults__ or {}).items()}
        before = value.__closure__ or (), value.__defaults__ or (), value.__kwdefaults__ or {}
        old = *before[0], *before[1], *before[2].values()
        if all(a is b for a, b in zip((*cells, *defaults, *keywords.values()), old, strict=True)):
            return value
        made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        made.__kwdefaults__ = keywords or None
        made.__qualname__ = value.__qualname__
        made.__dict__.update(value.__dict__)
        return made

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) not in self._cells:
            self._cells[id(cell)] = cell  # for a function that refers to itself
            try:
                content = cell.cell_contents
            except ValueError:  # it is empty
                return cell
            copied = self(content)
            if copied is not content:
                self._cells[id(cell)] = CellType(copied)
        return self._cells[id(cell)]


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
    """Every tensor in a module of ``model``: parameters, buffers, attributes, and lists of tensors."""
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers"):
                yield from (tensor for tensor in value.values() if tensor is not None)
            elif name != "_modules" and value is not None and type(value) is not bool:
                yield from tensors_of_tree(value)
