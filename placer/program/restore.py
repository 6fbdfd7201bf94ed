"""Snapshots of the attributes of modules, to find and undo what a forward changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (dict, list, set)


class Snapshot:
    """The ``__dict__`` of every module of ``model``, one level of containers deep.

    It covers attributes that are set, deleted or replaced, and the contents of dicts, lists and sets in
    attributes (``_parameters``, ``_buffers``, ``_modules`` and the hook tables are such dicts). Tensors are
    compared by identity; their data is not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (path, module, dict(module.__dict__)) for path, module in model.named_modules()
        ]
        self._contents = {
            id(value): value.copy()
            for _, _, attributes in self._modules
            for value in attributes.values()
            if isinstance(value, _CONTAINERS)
        }

    def changes(self) -> Iterator[tuple[str, str]]:
        """The ``(module path, attribute)`` pairs that have changed since, in module order."""
        for path, module, before in self._modules:
            now = module.__dict__
            for name in [*before, *(name for name in now if name not in before)]:
                if name not in now or name not in before or now[name] is not before[name]:
                    if name in now and name in before and _same(now[name], before[name]):
                        continue
                    yield path, name
                elif id(now[name]) in self._contents:
                    for key in _changed_keys(now[name], self._contents[id(now[name])]):
                        yield path, str(key) if name in ("_buffers", "_parameters") else name

    def restore(self) -> None:
        """Give every attribute and container its former value."""
        for _, module, attributes in self._modules:
            for value in attributes.values():
                content = self._contents.get(id(value))
                if content is None:
                    continue
                if isinstance(value, list):
                    value[:] = content
                else:
                    value.clear()
                    value.update(content)
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _same(now: Any, before: Any) -> bool:
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    simple = (bool, int, float, complex, str, bytes, type(None))
    return isinstance(now, simple) and bool(now == before)


def _changed_keys(now: Any, before: Any) -> list[Any]:
    if isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [k for k in keys if k not in now or k not in before or _differ(now[k], before[k])]
    if isinstance(now, list):
        same = len(now) == len(before) and not any(map(_differ, now, before))
        return [] if same else [0]
    return [] if now == before else [0]


def _differ(now: Any, before: Any) -> bool:
    if now is before:
        return False
    return isinstance(now, Tensor | nn.Module) or not _same(now, before)
