"""Plain attributes of modules that a forward reads: numbers, flags, lists, the fields of a config.

A program recorded under some of their values is the model's program only while they are the same.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OWN = frozenset(nn.Module().__dict__)  # tables, hooks and the mode: what torch itself looks at
_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_DEPTH = 6  # of objects and containers in one another; what lies deeper counts by identity


class _Absent(enum.Enum):
    ABSENT = enum.auto()  # stays itself when it is copied or pickled


_ABSENT = _Absent.ABSENT

# Where a tensor is: the path of a module, its attribute, then keys of containers or of objects.
TensorPath = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeGuard:
    """An attribute of the module at ``path``, what it was, and that in a form to compare.

    ``looked_at``: it is or holds a tensor whose values the Python code looked at. Of others only
    shape and dtype matter to the program, and which of them are one and the same.
    """

    path: str
    name: str
    value: Any
    frozen: Any
    looked_at: bool

    @property
    def is_plain(self) -> bool:
        """Is it a number, a text or the like, or missing: something that cannot change by itself?"""
        return isinstance(self.value, _PLAIN)

    def holds(self, modules: Mapping[str, nn.Module], freezer: Freezer) -> bool:
        """Is the attribute still what it was? ``freezer`` has had the guards before this one."""
        now = _attribute(modules.get(self.path), self.name)
        if now is self.value and self.is_plain:
            return True
        return bool(freezer.freeze(now, looked_at=self.looked_at) == self.frozen)


def failed_guard(
    guards: Collection[AttributeGuard], modules: Mapping[str, nn.Module]
) -> AttributeGuard | None:
    """The first of ``guards`` that an attribute of ``modules`` (by path) differs from."""
    freezer = Freezer()
    return next((s for s in guards if not s.holds(modules, freezer)), None)


def make_guards(
    model: nn.Module, names: Collection[tuple[str, str]], looked_at: Collection[Tensor] = ()
) -> tuple[AttributeGuard, ...]:
    """What the attributes (path, name) of ``model`` are; the tensors ``looked_at`` with their values."""
    modules = dict(model.named_modules())
    freezer = Freezer()
    seen = set(map(id, looked_at))
    guards = []
    for path, name in sorted(names):
        value = _attribute(modules.get(path), name)
        looked = any(id(tensor) in seen for _, tensor in _tensors_in(value))
        frozen = freezer.freeze(value, looked_at=looked)
        guards.append(
            AttributeGuard(path=path, name=name, value=value, frozen=frozen, looked_at=looked)
        )
    return tuple(guards)


def tensor_paths(
    model: nn.Module, names: Collection[tuple[str, str]], tensors: Mapping[str, Tensor]
) -> dict[str, TensorPath]:
    """Where those of ``tensors`` are that modules hold: in the attributes ``names``, or as attributes.

    Where several of ``names`` hold one, any will do: `AttributeGuard` says when they part.
    """
    modules = dict(model.named_modules())
    found: dict[int, TensorPath] = {}
    for path, name in sorted(names):
        for keys, tensor in _tensors_in(_attribute(modules.get(path), name)):
            found.setdefault(id(tensor), (path, name, *keys))
    for path, module in modules.items():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found.setdefault(id(value), (path, name))
    return {name: found[id(tensor)] for name, tensor in tensors.items() if id(tensor) in found}


def find_tensor(model: nn.Module, path: TensorPath) -> Tensor | None:
    """The tensor that is at ``path`` (of `tensor_paths`) now, None where there is none."""
    module, name, *keys = path
    try:
        value = getattr(model.get_submodule(module), name)
        for key in keys:
            value = value[key] if isinstance(value, dict | list | tuple) else vars(value)[key]
    except (AttributeError, LookupError, TypeError):
        return None
    return value if isinstance(value, Tensor) else None


def copy_guarded_attributes(
    guards: Collection[AttributeGuard],
    sources: Mapping[str, nn.Module],
    targets: Mapping[str, nn.Module],
) -> bool:
    """Give ``targets``, copies of ``sources`` by path, the attributes that these have now.

    Tensors stay as they are, also those in lists and the like, and so do modules that ``sources``
    lacks. Returns whether any differed.
    """
    changed = False
    for path, name in {(s.path, s.name): None for s in guards}:
        if path not in sources or path not in targets:
            continue
        now, then = _attribute(sources[path], name), _attribute(targets[path], name)
        if now is then or isinstance(now, Tensor):
            continue
        if Freezer().freeze(now) == Freezer().freeze(then):
            continue
        own = dict(_tensors_in(then))
        kept = {id(t): own.get(keys, t.detach()) for keys, t in _tensors_in(now)}
        _put(targets[path].__dict__, name, copy.deepcopy(now, kept))
        changed = True
    return changed


@contextmanager
def guarded_attributes_restored(
    modules: Mapping[str, nn.Module], guards: Collection[AttributeGuard]
) -> Iterator[None]:
    """Have ``modules`` these guards in this block: those that are plain values or missing."""
    tables = [(vars(modules[s.path]), s) for s in guards if s.path in modules and s.is_plain]
    before = [table.get(setting.name, _ABSENT) for table, setting in tables]
    for table, setting in tables:
        if _attribute(modules[setting.path], setting.name) is not setting.value:
            _put(table, setting.name, setting.value)
    try:
        yield
    finally:
        for (table, setting), value in zip(tables, before, strict=True):
            _put(table, setting.name, value)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


@contextmanager
def watch_attributes(
    modules: Mapping[str, nn.Module], read: Callable[[str, str], None]
) -> Iterator[None]:
    """Tell ``read`` the path and the name of each attribute of ``modules`` that code looks at.

    One that is missing counts, for it may be there later, and so does a plain one of the class, which
    an instance may get its own of. Parameters, buffers, submodules and methods do not. What code
    finds by ``vars(module)`` is not seen.
    """
    paths = {id(module): path for path, module in modules.items()}
    classes = dict.fromkeys(type(module) for module in modules.values())
    originals = {cls: cls.__getattribute__ for cls in classes}
    own = {cls: vars(cls).get("__getattribute__") for cls in classes}

    def watching(cls: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
        original = originals[cls]

        def getattribute(module: nn.Module, name: str) -> Any:
            if name in _OWN or name.startswith("__") or id(module) not in paths:
                return original(module, name)
            try:
                value = original(module, name)
            except AttributeError:
                if not any(name in original(module, table) for table in _TABLES):
                    read(paths[id(module)], name)
                raise
            if name in original(module, "__dict__") or isinstance(getattr(cls, name, cls), _PLAIN):
                read(paths[id(module)], name)
            return value

        return getattribute

    try:
        for cls in classes:
            cls.__getattribute__ = watching(cls)  # type: ignore[method-assign, assignment]
        yield
    finally:
        for cls, before in own.items():
            if before is None:
                del cls.__getattribute__
            else:
                cls.__getattribute__ = before  # type: ignore[method-assign]


class _Same:
    """An object that is equal to itself only."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value  # also keeps its id from being given away

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _attribute(module: nn.Module | None, name: str) -> Any:
    try:
        return getattr(module, name, _ABSENT)
    except Exception:  # a property that fails now
        return _ABSENT


class Freezer:
    """Puts values as they are now into a form that is equal to that of equal values.

    Of several values it notes which tensors are one and the same, by numbers in the order in which
    they come: give it the same attributes in the same order.
    """

    def __init__(self) -> None:
        # By id, with the value itself, so that the id is not given to another one.
        self._known: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._numbers: dict[int, int] = {}

    def freeze(self, value: Any, *, looked_at: bool = False) -> Any:
        """The form of ``value``; with the values of its tensors if they were ``looked_at``."""
        key = id(value), looked_at
        if key not in self._known:
            self._known[key] = value, self._freeze(value, _DEPTH, looked_at)
        return self._known[key][1]

    def _freeze(self, value: Any, depth: int, looked_at: bool) -> Any:
        kind = type(value)
        if isinstance(value, _PLAIN):
            return kind, value
        if isinstance(value, Tensor):
            number = self._numbers.setdefault(id(value), len(self._numbers))
            values = value.tolist() if looked_at and not value.is_meta else None
            return kind, value.shape, value.dtype, number, values
        if isinstance(value, np.ndarray):
            return kind, value.shape, value.dtype, value.tobytes()
        if isinstance(value, set | frozenset):
            return kind, set(value)
        parts = _parts(value) if depth > 0 else None
        if parts is None:
            return _Same(value)
        depth = _depth_inside(value, depth)
        return kind, [(key, self._freeze(item, depth, looked_at)) for key, item in parts]


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a container or the attributes of an object, by key; None: it is not looked into."""
    if isinstance(value, nn.Module | type) or callable(value):
        return None
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(vars(value).items()) if hasattr(value, "__dict__") else None


def _depth_inside(value: Any, depth: int) -> int:
    """How deep it goes on inside; objects, which may refer to each other, count twice."""
    return depth - (1 if isinstance(value, dict | list | tuple) else 2)


def _tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors that `Freezer` finds in ``value``, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield (), value
    elif depth > 0 and not isinstance(value, (*_PLAIN, np.ndarray, set, frozenset)):
        for key, item in _parts(value) or ():
            for keys, tensor in _tensors_in(item, _depth_inside(value, depth)):
                yield (key, *keys), tensor
