"""Containers that notice whether code reads them, or only adds to them and empties them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from placer.program.objects.paths import BOUND, Path, at
from placer.program.objects.reachable import ReachableState, Reference
from placer.program.objects.restore import OF_ENTRIES, Change

# Methods that do not tell what is in the container.
_ONLY_WRITE: dict[Any, tuple[str, ...]] = {
    list: ("append", "extend", "clear", "__iadd__"),
    deque: ("append", "appendleft", "extend", "extendleft", "clear", "__iadd__"),
    set: ("add", "update", "discard", "clear", "__ior__"),
    dict: ("__setitem__", "update", "clear", "__ior__"),
}
_NEVER_READ = (
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__",
    "__setattr__", "__delattr__", "__doc__", "__hash__", "__class_getitem__", "__dir__",
    "__format__", "__str__", "__getstate__", "maxlen",
)  # fmt: skip


class Watched:
    """Mixed into a container's class; ``was_read`` becomes true when something looks into the container."""

    was_read = False


def watched(container: Any) -> Any:
    """A container with the items of ``container`` that notices when it is read; None for other objects."""
    made = _CLASSES.get(type(container))
    if made is None:
        return None
    copied = made(container, container.maxlen) if isinstance(container, deque) else made(container)
    copied.was_read = False
    return copied


def _watched_class(kind: type[Any]) -> type[Any]:
    silent = (*_ONLY_WRITE[kind], *_NEVER_READ)
    names = [name for name in dir(kind) if name not in silent and callable(getattr(kind, name))]
    methods = {name: _reading(getattr(kind, name)) for name in names}
    return type(f"Watched{kind.__name__.title()}", (Watched, kind), methods)


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.was_read = True
        return method(self, *args, **kwargs)

    return read


_CLASSES = {kind: _watched_class(kind) for kind in _ONLY_WRITE}


class WatchedContainers:
    """The containers that forward has changed, by the root and path of what it has changed in them."""

    def __init__(self) -> None:
        self._containers: dict[tuple[str, Path], tuple[Path, Any]] = {}

    def add(self, key: tuple[str, Path], path: Path, container: Any) -> None:
        """Note that the change ``key`` is in ``container``, which is at ``path``."""
        self._containers[key] = path, container

    def was_read(self, key: tuple[str, Path]) -> bool:
        """Was the container of this change read? An attribute is in no container."""
        return key in self._containers and self._containers[key][1].was_read

    def was_added_to(self, change: Change) -> bool:
        """Is the change in a container, which was not read?"""
        key = change.root, change.path
        return key in self._containers and not self.was_read(key)

    def unread(self) -> tuple[Path, ...]:
        """Paths of the model's containers that were not read."""
        found = {
            path: None
            for (root, _), (path, container) in self._containers.items()
            if root == "model" and not container.was_read
        }
        return tuple(found)


def _reference(model: nn.Module, path: Path, value: Any) -> Reference:
    """Where ``model`` holds ``value``, which is at ``path``."""
    holder = at(vars(model.get_submodule(path[0])), path[1:-1])
    if isinstance(holder, tuple):
        return Reference(None, path[-1], value)
    is_table = isinstance(holder, (dict, list, deque, *BOUND))
    return Reference(holder if is_table else vars(holder), path[-1], value)


@contextmanager
def watching(
    changes: Sequence[Change], fake_model: nn.Module, reachable: ReachableState
) -> Iterator[WatchedContainers]:
    """In this block, the containers in which forward has made ``changes`` notice when they are read."""
    found = WatchedContainers()
    fixed_first = sorted(reachable.containers, key=lambda each: not each.is_fixed)
    references = {id(each.value): each for each in fixed_first}
    replaced: list[Callable[[], object]] = []
    made: dict[int, Any] = {}
    try:
        for change in changes:
            if change.root == "call":
                continue
            path = change.path[:-1] if change.kind in OF_ENTRIES else change.path
            container = change.holder
            if id(container) not in made:
                new = watched(container)
                if new is None:
                    continue
                made[id(container)] = new
                reference = (
                    references[id(container)]
                    if change.root == "code"
                    else _reference(fake_model, path, container)
                )
                if reference.is_fixed:  # what forward calls may be a method that only writes
                    method = getattr(reference.holder, "__name__", "")
                    new.was_read = method not in _ONLY_WRITE[type(container)]
                else:
                    reference.write(new)
                    replaced.append(lambda r=reference: r.write(r.value))  # type: ignore[misc]
            found.add((change.root, change.path), path, made[id(container)])
        yield found
    finally:
        for undo in reversed(replaced):
            undo()
