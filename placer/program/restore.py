"""Snapshots of the objects that a model's code can change, to find and undo what a forward changed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from placer.program.objects import Path, is_object, walk

_Contents = dict[Any, Any] | list[Any] | set[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What has become of one entry of a dict, an attribute of an object, or the items of a list or set.

    ``path`` leads to the entry, or to the list or set. "extend": a list or deque has ``value`` (a list) at
    its end, behind what it had; "update": a set has the items ``value`` besides those it had; "items": a
    list or set has just the items ``value`` now.
    """

    path: Path
    kind: Literal["set", "delete", "extend", "update", "items"]
    value: Any = None
    before: Any = None


@dataclass(frozen=True, slots=True)
class _Holder:
    path: Path
    object: Any
    contents: _Contents


class Snapshot:
    """The contents of every dict, list, deque and set, and the attributes of every object, in ``roots``.

    For a module, `module_roots` gives roots that cover its submodules and what their attributes hold.
    Tensors are compared by identity; their data is not copied.
    """

    def __init__(self, roots: Iterable[tuple[Path, Any]]) -> None:
        self._holders = [
            _Holder(path, value, contents)
            for path, value in walk(roots)
            if (contents := _contents(value)) is not None
        ]

    def changes(self) -> Iterator[Change]:
        """What has changed since, in the order in which the objects were found."""
        for holder in self._holders:
            now, before = _contents(holder.object), holder.contents
            if isinstance(now, dict) and isinstance(before, dict):
                for key in [*before, *(key for key in now if key not in before)]:
                    path = (*holder.path, key)
                    if key not in now:
                        yield Change(path=path, kind="delete", before=before[key])
                    elif key not in before:
                        yield Change(path=path, kind="set", value=now[key])
                    elif not _same(now[key], before[key]):
                        yield Change(path=path, kind="set", value=now[key], before=before[key])
            elif isinstance(now, set) and isinstance(before, set):
                if now > before:
                    yield Change(path=holder.path, kind="update", value=now - before, before=before)
                elif now != before:
                    yield Change(path=holder.path, kind="items", value=now, before=before)
            elif (
                isinstance(now, list) and isinstance(before, list) and not _same_items(now, before)
            ):
                new = _new_items(now, before, getattr(holder.object, "maxlen", None))
                if new is not None:
                    yield Change(path=holder.path, kind="extend", value=new, before=before)
                else:
                    yield Change(path=holder.path, kind="items", value=now, before=before)

    def restore(self) -> None:
        """Give every object that has changed its former contents."""
        for holder in self._holders:
            now, before = _contents(holder.object), holder.contents
            if isinstance(before, dict) and isinstance(now, dict):
                if list(now) != list(before) or any(now[key] is not before[key] for key in before):
                    _refill(holder.object, before)
            elif now != before if isinstance(before, set) else not _identical(now, before):
                _refill(holder.object, before)


def module_roots(model: nn.Module) -> list[tuple[Path, Any]]:
    """The modules of ``model`` as roots of a `Snapshot`: paths begin with a module's path."""
    return [((path,), module) for path, module in model.named_modules()]


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


def _contents(value: Any) -> _Contents | None:
    """A copy of what can be changed in ``value``; None if nothing can."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list | deque):
        return list(value)
    if isinstance(value, set):
        return set(value)
    return dict(vars(value)) if is_object(value) else None


def _refill(holder: Any, contents: _Contents) -> None:
    # By the methods of the builtin classes, since a subclass may refuse changes.
    if not isinstance(contents, dict):
        set_items(holder, contents)
        return
    table = holder if isinstance(holder, dict) else vars(holder)
    methods = OrderedDict if isinstance(table, OrderedDict) else dict
    methods.clear(table)
    for key, value in contents.items():
        methods.__setitem__(table, key, value)


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, Tensor | nn.Module) or type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    simple = (bool, int, float, complex, str, bytes, type(None))
    return isinstance(now, simple) and bool(now == before)


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
