"""What the code of a segment finds in the tree besides its inputs, kept for a second run in backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from placer.emit import SegmentCode
from placer.errors import PlacerError

_SETTINGS = (bool, int, float, str, tuple, NoneType)  # types of attributes that are kept
_MISSING = object()

Entry = tuple[dict[str, Any], str, Any]  # a dict in the tree, a key, and the value there


class SegmentState:
    """The modules, their settings, and the tensors that a segment is about to read from ``tree``.

    Between forward and backward, the caller or forward itself may change modes, freeze weights, or replace
    layers and weights, as ``torch.func.functional_call`` does. Tensors that the segment writes are copied.
    `has_run` is called after the first run, in which a module that stays whole may have written others.
    """

    def __init__(self, segment: SegmentCode, tree: Any) -> None:
        written = list(tensors_at(tree, segment.written))
        self._copies = [(*_table(tree, name), x.detach().clone()) for name, x in written]
        copied = {id(tensor) for _, tensor in written}
        self._entries: list[Entry] = []
        self._tensors: list[tuple[str, Tensor, bool]] = []
        self._data: list[tuple[int, Any]] = []  # of each, after the first run
        for name, entry in _entries(segment, tree):
            self._entries.append(entry)
            value = entry[-1]
            if isinstance(value, Tensor) and id(value) not in copied:
                self._tensors.append((name, value, value.requires_grad))

    def has_run(self) -> None:
        """From now on, nothing may be written to the tensors."""
        self._data = [_data(tensor) for _, tensor, _ in self._tensors]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """In this block, the tree has what it had, and copies of the tensors that the segment wrote.

        Raises ``PlacerError`` if another tensor was changed in place.
        """
        frozen = {}
        for (name, tensor, requires_grad), (version, storage) in zip(
            self._tensors, self._data, strict=True
        ):
            present = _data(tensor)
            if present[0] != version or present[1] is not storage:
                raise changed_in_place(name, "runs its layer again", "checkpoint")
            if tensor.requires_grad != requires_grad:
                frozen[id(tensor)] = tensor.detach().requires_grad_(requires_grad)
        entries = [
            (table, key, frozen.get(id(value), value)) for table, key, value in self._entries
        ]
        entries += [
            (table, key, value.clone().requires_grad_(table[key].requires_grad))
            for table, key, value in self._copies
        ]
        held = [(table, key, table.get(key, _MISSING)) for table, key, _ in entries]
        _put(entries)
        try:
            yield
        finally:
            _put(reversed(held))


def changed_in_place(name: str, what: str, field: str) -> PlacerError:
    """The error for a tensor that was changed before a backward that does ``what``, as ``field`` asks."""
    return PlacerError(
        name,
        f"was changed in place after the forward, before its backward, which {what}",
        f'run the backward before you change it, or leave its layer out of "{field}"',
    )


def tensors_at(tree: Any, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with these dotted names in ``tree`` (of modules or clones), with their names."""
    for name in names:
        table, leaf = _table(tree, name)
        yield name, table[leaf]


def tensors_read(segment: SegmentCode, tree: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that the segment reads, with their names."""
    for name, (_, _, value) in _entries(segment, tree):
        if isinstance(value, Tensor):
            yield name, value


def _entries(segment: SegmentCode, tree: Any) -> Iterator[tuple[str, Entry]]:
    """Where the segment's code finds modules, their settings and tensors, and what it finds there now."""
    for path in segment.modules:
        yield from _on_the_way(tree, path)
        for name, module in _find(tree, path).named_modules(prefix=path):
            for table in (module._modules, module._parameters, module._buffers):
                yield from ((f"{name}.{key}", (table, key, x)) for key, x in table.items())
            settings = vars(module)
            yield from (
                (name, (settings, key, x)) for key, x in settings.items() if type(x) in _SETTINGS
            )
    for path in segment.attributes:
        yield from _on_the_way(tree, path.rpartition(".")[0])
        table, leaf = _table(tree, path)
        yield path, (table, leaf, table[leaf])


def _on_the_way(tree: Any, path: str) -> Iterator[tuple[str, Entry]]:
    """The entries of the modules on ``path``, if the tree is a model, not clones for one call."""
    for name in path.split(".") if path else ():
        if isinstance(tree, nn.Module) and name in tree._modules:
            yield path, (tree._modules, name, tree._modules[name])
        tree = getattr(tree, name)


def _find(tree: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        tree = getattr(tree, name)
    return tree


def _table(tree: Any, name: str) -> tuple[dict[str, Any], str]:
    """The dict in ``tree`` that contains the tensor ``name``, and its key there."""
    owner, _, leaf = name.rpartition(".")
    value = _find(tree, owner)
    tables = (value._buffers, value._parameters) if isinstance(value, nn.Module) else ()
    return next((table for table in tables if leaf in table), vars(value)), leaf


def _put(entries: Iterable[Entry]) -> None:
    for table, key, value in entries:
        if value is _MISSING:
            table.pop(key, None)
        elif table.get(key, _MISSING) is not value:
            table[key] = value


def _data(tensor: Tensor) -> tuple[int, Any]:
    """Its version and its storage: one of them is another after a write, or an assignment to ``data``."""
    version = 0 if tensor.is_inference() else tensor._version
    return version, tensor.untyped_storage() if tensor.layout == torch.strided else None
