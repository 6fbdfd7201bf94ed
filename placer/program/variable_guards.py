"""Guards on variables of a model's code that forward reads: global, of closures, or of classes."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any, Self

from torch import Tensor, nn

from placer.program.guards import (
    DEPTH,
    PLAIN_VALUES,
    AttributeGuard,
    Freezer,
    depth_inside,
    part_of,
    values_of,
)
from placer.program.objects.paths import (
    ARRAYS,
    LARGE,
    Path,
    array_contents,
    module_parts,
    parts,
    walk,
)
from placer.program.objects.reachable import ReachableState, Reference
from placer.program.objects.restore import Change
from placer.program.stored import StateInput

_COMPARED = (*PLAIN_VALUES, enum.Enum, FunctionType, BuiltinFunctionType, type)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfVariable(AttributeGuard):
    """A guard on ``variable``, which copies of the model share. ``path`` means nothing."""

    variable: Reference

    @property
    def label(self) -> str:
        """The name of the variable."""
        return self.name

    @property
    def is_in_model(self) -> bool:
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableGuard(_OfVariable):
    """A variable of the model's code that holds a tensor, itself or at ``keys``.

    ``frozen`` are the values of the tensor, if ``values_read``.
    """

    keys: Path

    def holds(self, modules: Mapping[str, nn.Module], freezer: Freezer) -> bool:
        """Does it still hold the same tensor?"""
        now = part_of(self.variable.read(), self.keys)
        return now is self.value and (not self.values_read or values_of(now) == self.frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsGuard(_OfVariable):
    """A variable of the model's code that is plain, or a container or object that holds plain values.

    ``frozen`` are these values with the keys that lead to them, without what is at the keys ``unread``.
    """

    def holds(self, modules: Mapping[str, nn.Module], freezer: Freezer) -> bool:
        """Does it have the same plain values?"""
        now = self.variable.read()
        return (now is self.value and self.is_plain) or self._settings(now) == self.frozen

    def changed_numbers(self) -> Iterator[StateInput]:
        """The numbers that are others now, as inputs of a program."""
        before = {keys: (kind, value) for keys, kind, value in self.frozen}
        for keys, kind, value in self._settings(self.variable.read()):
            kind_before, value_before = before.get(keys, (None, value))
            if kind in (int, float) and kind is kind_before and value != value_before:
                number = replace(self.variable, keys=keys)
                yield StateInput(name=number.name, variable=number, kind=kind)

    def _settings(self, value: Any) -> list[tuple[Path, type, Any]]:
        return list(_settings(value, self.unread))


def variable_guards(
    model: nn.Module,
    code: ReachableState,
    tensors: Collection[Tensor],
    values_read: Collection[Tensor],
) -> tuple[VariableGuard, ...]:
    """Guards for those of ``tensors`` that are not in ``model``, but in variables of its ``code``."""
    wanted = {id(tensor): tensor for tensor in tensors}
    for _, value in walk(module_parts(model)) if wanted else ():
        wanted.pop(id(value), None)
    looked = set(map(id, values_read))
    guards = []
    # Variables first: an object in one may be replaced, and with it the containers that it holds
    for roots in ([*code.variables, *code.objects], code.containers) if wanted else ():
        for (index, *keys), value in walk(((i,), each.read()) for i, each in enumerate(roots)):
            if wanted.pop(id(value), None) is None:
                continue
            is_read = id(value) in looked
            guards.append(
                VariableGuard(
                    path="a variable",
                    name=roots[index].name,
                    value=value,
                    frozen=values_of(value) if is_read else None,
                    values_read=is_read,
                    variable=replace(roots[index], code=None),
                    keys=tuple(keys),
                )
            )
    return tuple(guards)


def settings_guards(
    variables: Collection[Reference], changes: Collection[Change], numbers: Collection[StateInput]
) -> tuple[SettingsGuard, ...]:
    """Guards for the plain values of ``variables``, except those that ``changes`` or ``numbers`` have."""
    skipped = {change.place for change in changes}
    skipped.update(_place_in(x.variable) for x in numbers if x.variable is not None)
    guards = []
    for each in variables:
        value = each.read()
        if isinstance(value, Tensor) or (id(each.holder), each.key) in skipped:
            continue
        unread = tuple(_find(value, skipped))
        guards.append(
            SettingsGuard(
                path="a variable",
                name=each.name,
                value=value,
                frozen=list(_settings(value, unread)),
                values_read=False,
                unread=unread,
                variable=replace(each, code=None),
            )
        )
    return tuple(guards)


def _place_in(number: Reference) -> tuple[int, Any]:
    if not number.keys:
        return id(number.holder), number.key
    return id(replace(number, keys=number.keys[:-1]).read()), number.keys[-1]


def _find(
    value: Any, places: Collection[tuple[int, Any]], keys: Path = (), depth: int = DEPTH
) -> Iterator[Path]:
    """The keys in ``value`` that lead to ``places``."""
    tables = {id(value), id(getattr(value, "__dict__", None))}
    if any((table, None) in places for table in tables):
        yield keys
    elif depth > 0 and not (keys and isinstance(value, nn.Module)):
        for key, part in parts(value):
            if any((table, key) in places for table in tables):
                yield (*keys, key)
            else:
                yield from _find(part, places, (*keys, key), depth_inside(value, depth))


def _settings(
    value: Any, unread: Collection[Path], keys: Path = (), depth: int = DEPTH
) -> Iterator[tuple[Path, type, Any]]:
    """The plain values and functions in ``value``, and the types of the rest, with keys, in a fixed order."""
    if keys in unread:
        return
    compared = isinstance(value, _COMPARED)
    # A module is compared by its identity
    held = value if compared or isinstance(value, nn.Module) else None
    yield keys, type(value), array_contents(value, LARGE) if isinstance(value, ARRAYS) else held
    inside = isinstance(value, FunctionType) or not compared
    if depth > 0 and inside and not (keys and isinstance(value, nn.Module)):
        for key, part in parts(value):
            yield from _settings(part, unread, (*keys, key), depth_inside(value, depth))
