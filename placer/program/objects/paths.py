"""What Python objects consist of: the items of containers, the attributes of objects, and their paths."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Keys that lead from an object to a part of it: keys of dicts, indices of lists and tuples, and names of
# attributes of all other objects. For modules these are names in `vars`, such as "_buffers".
Path = tuple[Any, ...]

_ATOMS = (
    *(str, bytes, bool, int, float, complex, type(None), range, slice, type(...)),
    *(Tensor, np.ndarray, np.generic, torch.dtype, torch.device, torch.layout, torch.Generator),
    *(type, ModuleType, weakref.ref, torch.memory_format),
)
ARRAYS = (np.ndarray, bytearray, array)
LARGE = 1 << 20  # bytes of an array that is data or a table
# Functions that are bound to objects; the parts of a function of Python are `function_parts`.
BOUND = (MethodType, BuiltinFunctionType, MethodWrapperType)
_PLAIN = frozenset({str, bool, int, float, type(None), Tensor, nn.Parameter})  # looked up faster
_NO_OBJECTS = (*_ATOMS, *BOUND, FunctionType, functools.partial)
_ITERABLES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
_MOST = 50_000  # objects in one walk besides twice its roots; attributes that reach more are not searched


def parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """The parts of ``value`` with their keys; none for tensors, numbers, functions and other atoms.

    The items of sets have no keys: None stands for each. A bound method has its owner, a ``partial`` its
    arguments, unless they are modules.
    """
    if isinstance(value, dict):
        return list(entries_of(value))
    if type(value) in _PLAIN or isinstance(value, _ATOMS):
        return ()
    if isinstance(value, BOUND):
        return () if isinstance(value.__self__, nn.Module) else [("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        held = [*enumerate(value.args), *value.keywords.items()]
        return [(key, part) for key, part in held if not isinstance(part, nn.Module)]
    if isinstance(value, FunctionType):
        return [(key, part) for key, part in vars(value).items() if key != "__wrapped__"]
    items = items_of(value)
    if items is not None:
        return (
            [(None, x) for x in items] if isinstance(value, set | frozenset) else enumerate(items)
        )
    return list(attributes_of(value).items()) if is_object(value) or has_slots(value) else ()


@functools.cache
def _slot_names(kind: Any) -> tuple[str, ...]:
    # Classes of Python's library keep caches there, as paths do.
    if kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "torch", "placer"):
        return ()
    tables = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    found = [
        [name for name, value in table.items() if isinstance(value, MemberDescriptorType)]
        for table in tables
    ]
    return () if kind.__dictoffset__ else tuple(itertools.chain(*found))


def has_slots(value: Any) -> bool:
    """Is ``value`` an object of a class that has ``__slots__`` instead of a ``__dict__``?"""
    return bool(_slot_names(value.__class__)) and not isinstance(value, _ATOMS)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object; if it has ``__slots__``, those that are set now, in a new dict."""
    if not has_slots(value):
        table: dict[str, Any] = vars(value)
        return table
    return {
        name: getattr(value, name) for name in _slot_names(value.__class__) if hasattr(value, name)
    }


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Set the attributes of an object that has ``__slots__``, even a frozen one, and delete others."""
    for name in attributes_of(value).keys() - attributes.keys():
        object.__delattr__(value, name)
    for name, each in attributes.items():
        object.__setattr__(value, name, each)


def entries_of(value: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The entries of a dict in its order, even if its class has its own way to list them."""
    return OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)


def items_of(value: Any) -> list[Any] | None:
    """The items of a list, tuple, deque or set, even if its class has its own way to list them; else None."""
    if not isinstance(value, _ITERABLES):
        return None
    kind = next(kind for kind in _ITERABLES if isinstance(value, kind))
    return list(kind.__iter__(value))


def array_contents(value: Any, most: float = math.inf) -> Any:
    """What is in one of `ARRAYS`, to compare; None if it has more bytes."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes()) if value.nbytes <= most else None
    return bytes(value) if len(value) <= most else None


def is_object(value: Any) -> bool:
    """Is ``value`` an object with attributes: no container, tensor, function, class or other atom?"""
    return not isinstance(value, _NO_OBJECTS) and hasattr(value, "__dict__")


def function_parts(value: Any) -> list[tuple[Any, Any]]:
    """What a function, bound method or ``partial`` refers to: closure, defaults, owner, arguments.

    Each has the name of its variable, or the number of an argument.
    """
    if isinstance(value, MethodType):
        return [("__func__", value.__func__), ("self", value.__self__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True)
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return [*((name, part) for name, part in cells if part is not None), *defaults]
    return []


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def walk(
    roots: Iterable[tuple[Path, Any]], *, functions: bool = False, without: Container[int] = ()
) -> Iterator[tuple[Path, Any]]:
    """Every object that ``roots`` consist of, once, with a path; in the order of discovery.

    With ``functions`` also what functions in them refer to, whose paths then do not lead to it. Objects with
    the ids ``without``, and what only they consist of, are left out.
    """
    seen: dict[int, Any] = {}  # the values keep the ids valid
    waiting = deque(roots)
    most = _MOST + 2 * len(waiting)  # each module is many roots, and has few tensors
    while waiting and len(seen) < most:
        path, value = waiting.popleft()
        if id(value) in seen or id(value) in without:
            continue
        seen[id(value)] = value
        yield path, value
        if type(value) in _PLAIN:
            continue
        waiting.extend([((*path, key), part) for key, part in parts(value)])
        if functions:
            waiting.extend(((*path, None), part) for _, part in function_parts(value))


def at(value: Any, path: Sequence[Any]) -> Any:
    """The part of ``value`` at ``path``. Raises ``LookupError`` if there is none."""
    for key in path:
        try:
            value = (
                value[key]
                if isinstance(value, dict | list | tuple | deque)
                else dict(parts(value))[key]
            )
        except (IndexError, KeyError, TypeError) as error:
            raise LookupError(path) from error
    return value


def attribute_of(path: Path) -> tuple[str, str]:
    """The module's path and the name of the attribute, parameter or buffer that ``path`` leads into."""
    module, name, *keys = path
    inside = keys and name in ("_buffers", "_parameters")
    return module, str(keys[0]) if inside else name


def spell(path: Sequence[Any]) -> str:
    """``path`` for a message: ``encoder.losses[0]``.

    >>> spell(("encoder", "_buffers", "mean")), spell(("cache", 0, "keys"))
    ('encoder.mean', 'cache[0].keys')
    """
    kept = [
        key for key in path if key not in ("", "_buffers", "_parameters", "_modules", "__self__")
    ]
    texts = (f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in kept)
    return "".join(texts).lstrip(".")


# What every module has: tensors, submodules, hooks, the mode
MODULE_TABLES = frozenset(vars(nn.Module()))


def module_parts(model: nn.Module) -> Iterator[tuple[Path, Any]]:
    """The attributes of all modules of ``model``, each with the path ``(module path, attribute)``.

    Without the `MODULE_TABLES` that are empty, of which every module has a dozen.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in MODULE_TABLES or value:
                yield (path, name), value


def hidden_modules(model: nn.Module) -> dict[Path, nn.Module]:
    """Modules in attributes that ``named_modules`` does not list, such as a teacher in a list."""
    known = set(map(id, model.modules()))
    return {
        path: value
        for path, value in walk(module_parts(model))
        if isinstance(value, nn.Module) and id(value) not in known
    }
