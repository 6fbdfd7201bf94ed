"""Snapshots of the objects that a model's code can change, to find and undo what a forward changed."""

from __future__ import annotations

import contextvars
import copy
import ctypes
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor, nn

from placer._torch import HOOK_TABLES
from placer.program.objects.hook_table import HookTable
from placer.program.objects.paths import (
    ARRAYS,
    LARGE,
    Path,
    array_contents,
    attributes_of,
    entries_of,
    has_slots,
    is_object,
    items_of,
    parts,
    set_attributes,
    walk,
)
from placer.program.objects.python_random import set_state, state_of
from placer.program.objects.reachable import ReachableState, Reference

MISSING = object()
"""The value of an entry that does not exist."""

_Contents: TypeAlias = Any  # a dict, list or set, or one of `ARRAYS`
_PLAIN = frozenset({dict, OrderedDict, list, set})


Kind = Literal["set", "delete", "move", "extend", "update", "items"]
OF_ENTRIES = ("set", "delete", "move")


@dataclass(frozen=True, slots=True)
class Change:
    """What has become of a variable, an entry of a dict, an attribute of an object, or the items of a list.

    ``path`` leads to the entry, or to the list or set. "extend": a list or deque has ``value`` (a list) at
    its end, behind what it had; "update": a set has the items ``value`` besides those it had; "items": a
    list or set has just the items ``value`` now; "move": an entry is the last of its dict now. ``holder`` is
    the container, the object, or the reference to the variable. ``root`` says where paths begin: "code" or
    what the `Snapshot` was given.
    """

    root: str
    path: Path
    kind: Kind
    value: Any
    before: Any
    holder: Any

    @property
    def place(self) -> tuple[int, Any]:
        """The id of the table and the key of what has changed; the key None stands for all items."""
        if isinstance(self.holder, Reference):
            return id(self.holder.holder), self.holder.key
        return id(self.holder), self.path[-1] if self.kind in OF_ENTRIES else None

    @property
    def now(self) -> Any:
        """What is there after the change: the value, or all items."""
        if self.kind == "update":
            return self.before | self.value
        if self.kind != "extend":
            return self.value
        limit = getattr(self.holder, "maxlen", None)
        items = [*self.before, *self.value]
        return items if limit is None else items[len(items) - limit :]


@dataclass(frozen=True, slots=True)
class _Holder:
    root: str
    path: Path
    object: Any
    contents: _Contents

    def changes(self) -> Iterator[Change]:
        if type(self.object) in _PLAIN and not self.object and not self.contents:
            return  # as most are: every module has a dozen for hooks
        now, before = _contents(self.object), self.contents
        if isinstance(now, ARRAYS):
            if not _same_array(now, before):
                yield Change(self.root, self.path, "items", now, before, self.object)
        elif isinstance(now, dict) and isinstance(before, dict):
            keys = [*before, *(key for key in now if key not in before)]
            for key in keys:
                value, old = now.get(key, MISSING), before.get(key, MISSING)
                if not _same(value, old):
                    kind: Kind = "delete" if value is MISSING else "set"
                    yield Change(self.root, (*self.path, key), kind, value, old, self.object)
            for key in _moved(now, keys) if isinstance(self.object, dict) else ():
                value = now[key]
                yield Change(self.root, (*self.path, key), "move", value, value, self.object)
        elif isinstance(now, set) and isinstance(before, set):
            if now > before:
                yield Change(self.root, self.path, "update", now - before, before, self.object)
            elif now != before:
                yield Change(self.root, self.path, "items", now, before, self.object)
        elif isinstance(now, list) and isinstance(before, list) and not _same_items(now, before):
            new = _new_items(now, before, getattr(self.object, "maxlen", None))
            if new is None:
                yield Change(self.root, self.path, "items", now, before, self.object)
            else:
                yield Change(self.root, self.path, "extend", new, before, self.object)


class Snapshot:
    """The contents of every dict, list, deque and set, and the attributes of every object, in ``roots``.

    For a module, `module_roots` gives roots that cover its submodules and what their attributes hold.
    ``code`` is what the model's code can reach besides: its variables, and the containers in them. A path
    there is ``(name,)``, or ``(name, key)`` for an entry of a container. Tensors are compared by identity;
    their data is not copied. Objects with the ids ``without`` are left out.
    """

    def __init__(
        self,
        roots: Iterable[tuple[Path, Any]],
        code: ReachableState | None = None,
        *,
        root: str = "model",
        without: Container[int] = (),
    ) -> None:
        self._holders = {  # by the id of the object
            id(value): _Holder(root, path, value, contents)
            for path, value in walk(roots, without=without)
            if (contents := _contents(value)) is not None
        }
        self._variables: list[tuple[Reference, Any]] = []
        if code is not None:
            for each in code.containers:
                value = _present(each)
                contents = _contents(value)
                if contents is not None and id(value) not in self._holders:
                    self._holders[id(value)] = _Holder("code", (each.name,), value, contents)
            self._variables += [(reference, reference.read()) for reference in code.variables]
        drawn = [] if code is None else [each.value for each in code.generators]
        self._generators = [(generator, state_of(generator)) for generator in drawn]

    def changes(self) -> Iterator[Change]:
        """What has changed since, in the order in which the objects were found."""
        for reference, before in self._variables:
            now = reference.read()
            if not _same(now, before):
                yield Change("code", (reference.name,), "set", now, before, reference)
        for holder in self._holders.values():
            yield from holder.changes()

    def path_of(self, value: Any) -> Path | None:
        """The path of an object or a container in an attribute of the model, which had it already."""
        holder = self._holders.get(id(value))
        if holder is None or holder.root != "model" or isinstance(value, nn.Module):
            return None
        return holder.path if len(holder.path) > 1 else None

    def changes_in(self, objects: Iterable[Any]) -> Iterator[Change]:
        """What has changed since in these objects."""
        for value in objects:
            if id(value) in self._holders:
                yield from self._holders[id(value)].changes()

    def restore(self) -> None:
        """Give every variable and object that has changed its former contents."""
        for reference, value in self._variables:
            if reference.read() is not value:
                reference.write(value)
        for generator, state in self._generators:
            set_state(generator, state)
        for holder in self._holders.values():
            now, before = _contents(holder.object), holder.contents
            if isinstance(before, ARRAYS):
                if not _same_array(now, before):
                    holder.object[... if isinstance(before, np.ndarray) else slice(None)] = before
            elif isinstance(before, dict) and isinstance(now, dict):
                if list(now) != list(before) or any(now[key] is not before[key] for key in before):
                    _refill(holder.object, before)
            elif now != before if isinstance(before, set) else not _identical(now, before):
                _refill(holder.object, before)


@contextmanager
def own_context() -> Iterator[None]:
    """In this block, code sets context variables for the block only.

    One that had no value has none again after it, which nothing else in Python can do without its token.
    """
    context = ctypes.py_object(contextvars.copy_context())
    ctypes.pythonapi.PyContext_Enter(context)
    try:
        yield
    finally:
        ctypes.pythonapi.PyContext_Exit(context)


@contextmanager
def restored(snapshot: Snapshot) -> Iterator[None]:
    """Restore what ``snapshot`` has at the end of this block."""
    try:
        yield
    finally:
        snapshot.restore()


def module_roots(model: nn.Module, prefix: str = "") -> list[tuple[Path, Any]]:
    """The modules of ``model`` as roots of a `Snapshot`: paths begin with a module's path."""
    return [((path,), module) for path, module in model.named_modules(prefix=prefix)]


def hook_owners(module: nn.Module, path: str, modules: Container[int]) -> list[tuple[Path, Any]]:
    """The objects whose methods are hooks in ``module``, as roots of a `Snapshot`.

    The model's own ``modules`` (ids) are left out, and so is what hooks name: other snapshots have them.
    """
    return [
        ((name, table, index), hook.__self__)
        for name, each in module.named_modules(prefix=path)
        for table in HOOK_TABLES
        for index, hook in enumerate(vars(each)[table].values())
        if isinstance(hook, MethodType) and id(hook.__self__) not in modules
    ]


def set_items(holder: Any, items: Iterable[Any]) -> None:
    """Make ``items`` the items of a list, deque or set."""
    if isinstance(holder, set):
        set.clear(holder)
        set.update(holder, items)
    else:
        sequence: MutableSequence[Any] = holder
        items = list(items)
        sequence.clear()
        sequence.extend(items)


def _present(reference: Reference) -> Any:
    """The container of ``reference``, or the one that watches it in its place."""
    found = reference.value if reference.is_fixed else reference.read()
    return found if isinstance(found, type(reference.value)) else reference.value


def _contents(value: Any) -> _Contents | None:
    """A copy of what can be changed in ``value``; None if nothing can."""
    if isinstance(value, dict):
        return dict(value.items() if isinstance(value, HookTable) else entries_of(value))
    if isinstance(value, ARRAYS):
        fixed = isinstance(value, np.ndarray) and not value.flags.writeable
        return None if fixed or array_contents(value, LARGE) is None else copy.copy(value)
    items = items_of(value) if isinstance(value, list | deque | set) else None
    if items is not None:
        return set(items) if isinstance(value, set) else items
    if is_object(value) or has_slots(value) or isinstance(value, FunctionType):
        return dict(attributes_of(value))
    return None


def _refill(holder: Any, contents: _Contents) -> None:
    # By the methods of the builtin classes, since a subclass may refuse changes.
    if not isinstance(contents, dict):
        set_items(holder, contents)
        return
    if not isinstance(holder, dict) and has_slots(holder):
        set_attributes(holder, contents)
        return
    table = holder if isinstance(holder, dict) else vars(holder)
    if isinstance(table, HookTable):
        table.put_back()
    methods = OrderedDict if isinstance(table, OrderedDict) else dict
    methods.clear(table)
    for key, value in contents.items():
        methods.__setitem__(table, key, value)


def is_same(now: Any, before: Any) -> bool:
    """Are these the same contents of a place (`Change.now`)?"""
    if isinstance(now, list | set) and type(now) is type(before):
        return now == before if isinstance(now, set) else _same_items(now, before)
    if isinstance(now, ARRAYS) and type(now) is type(before):
        return _same_array(now, before)
    return _same(now, before)


def has_same_contents(now: Any, before: Any, levels: int = 8) -> bool:
    """Are these the same, or objects and containers that consist of the same? Tensors have to be the same."""
    if is_same(now, before):
        return True
    consists = is_object(now) or items_of(now) is not None or isinstance(now, dict)
    if not (levels and consists) or type(now) is not type(before) or isinstance(now, nn.Module):
        return False
    own, other = list(parts(now)), list(parts(before))
    return len(own) == len(other) and all(
        key == other_key and has_same_contents(part, other_part, levels - 1)
        for (key, part), (other_key, other_part) in zip(own, other, strict=True)
    )


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, Tensor | nn.Module) or type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    simple = (bool, int, float, complex, str, bytes, type(None))
    return isinstance(now, simple) and bool(now == before)


def _moved(now: Iterable[Any], keys: Sequence[Any]) -> list[Any]:
    """The keys ``now`` from the first that follows a later one of ``keys``."""
    now, position = list(now), {key: index for index, key in enumerate(keys)}
    pairs = enumerate(pairwise(now), 1)
    return next((now[i:] for i, (a, b) in pairs if position[a] > position[b]), [])


def _same_array(now: Any, before: Any) -> bool:
    return bool(array_contents(now) == array_contents(before))


def _same_items(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(_same, now, before))


def _identical(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _new_items(now: list[Any], before: list[Any], limit: int | None) -> list[Any] | None:
    """The items at the end of ``now`` that were appended to ``before``; None if it was changed otherwise.

    A list that holds at most ``limit`` items loses the first ones.
    """
    if len(now) > len(before) and _same_items(now[: len(before)], before):
        return now[len(before) :]
    if limit is None or len(now) < limit:
        return None
    kept = range(min(len(now), len(before)), 0, -1)
    found = (n for n in kept if _same_items(now[:n], before[len(before) - n :]))
    return next((now[n:] for n in found), None)
