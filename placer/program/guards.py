"""Guards on attributes that a forward reads: numbers, flags, lists, the fields of a config.

A graph that was recorded while they had some values is valid only while they still have them.
"""

from __future__ import annotations

import copy
import enum
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from placer._torch_patches import override_getattribute, override_setattr
from placer.program.constants import digest
from placer.program.objects.paths import (
    ARRAYS,
    MODULE_TABLES,
    Path,
    array_contents,
    at,
    attributes_of,
    has_slots,
    module_parts,
    walk,
)
from placer.program.result import PLAIN

_TABLES = ("_parameters", "_buffers", "_modules")
PLAIN_VALUES = (*PLAIN, torch.device)
DEPTH = 6  # nesting of containers and objects; deeper values are compared by identity
_SMALL = 1000  # elements of a tensor that is compared by its values and not by a hash
_hashes = WeakTensorKeyDictionary()  # large tensor -> (version, hash of its values)


class _Absent(enum.Enum):
    ABSENT = enum.auto()  # an enum member is still the same object after copying or pickling


_ABSENT = _Absent.ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeGuard:
    """An attribute that forward read: the module's ``path``, the ``name``, and the ``value`` then.

    ``frozen`` is the value in a form that can be compared (`Freezer`). ``values_read``: the attribute is
    or holds a tensor whose values the Python code read. For other tensors only the shape, the dtype
    and their identity matter to the program.
    """

    path: str
    name: str
    value: Any
    frozen: Any
    values_read: bool
    # Keys of containers in the value whose items do not matter, and of numbers of which any will do.
    unread: tuple[Path, ...] = ()

    @property
    def label(self) -> str:
        """What it is called in messages, such as ``encoder.scale``."""
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def is_plain(self) -> bool:
        """Is the value immutable (a number, a string, a tuple of these), or is the attribute missing?"""
        if type(self.value) is tuple:
            return all(isinstance(value, PLAIN_VALUES) for value in self.value)
        return isinstance(self.value, PLAIN_VALUES)

    @property
    def is_in_model(self) -> bool:
        """Is it an attribute of a module, of which each copy of the model has its own?"""
        return True

    def holds(self, modules: Mapping[str, nn.Module], freezer: Freezer) -> bool:
        """Is the attribute still what it was? ``freezer`` must have frozen the guards before this one."""
        now = _attribute(modules.get(self.path), self.name)
        if now is self.value and self.is_plain:
            return True
        frozen = freezer.freeze(now, values_read=self.values_read, unread=self.unread)
        return bool(frozen == self.frozen)


def failed_guard(
    guards: Collection[AttributeGuard], modules: Mapping[str, nn.Module]
) -> AttributeGuard | None:
    """The first of ``guards`` that does not hold for ``modules`` (path -> module), or None."""
    freezer = Freezer(modules)
    return next((s for s in guards if not s.holds(modules, freezer)), None)


def make_guards(
    model: nn.Module,
    names: Collection[tuple[str, str]],
    values_read: Collection[Tensor] = (),
    unread: Collection[Path] = (),
) -> tuple[AttributeGuard, ...]:
    """Guards for the attributes ``names`` (module path, attribute) of ``model``, in sorted order.

    Values of tensors are compared only for those in ``values_read``, and containers and numbers at the paths
    ``unread`` only by their types.
    """
    modules = dict(model.named_modules())
    freezer = Freezer(modules)
    seen = set(map(id, values_read))
    guards = []
    for path, name in sorted(names):
        value = _attribute(modules.get(path), name)
        looked = any(id(tensor) in seen for _, tensor in _tensors_in(value))
        keys = tuple(each[2:] for each in unread if each[:2] == (path, name))
        frozen = freezer.freeze(value, values_read=looked, unread=keys)
        guards.append(
            AttributeGuard(
                path=path, name=name, value=value, frozen=frozen, values_read=looked, unread=keys
            )
        )
    return tuple(guards)


def tensor_paths(
    model: nn.Module, names: Collection[tuple[str, str]], tensors: Mapping[str, Tensor]
) -> dict[str, Path]:
    """Where ``model`` holds the ``tensors``, by the same keys; tensors that it does not hold are left out.

    Searched are the attributes ``names`` (module path, attribute), with containers and objects in
    them, and then all attributes of modules, also modules in attributes. If several of ``names`` hold a
    tensor, any of them will do: an `AttributeGuard` fails when they no longer hold the same one.
    """
    modules = dict(model.named_modules())
    watched = [((p, n), _attribute(modules.get(p), n)) for p, n in sorted(names)]
    on_tensors = [
        ((*path, key), value)
        for path, tensor in watched
        if isinstance(tensor, Tensor)
        for key, value in vars(tensor).items()
    ]
    found: dict[int, Path] = {}
    for path, value in walk([*watched, *on_tensors, *module_parts(model)] if tensors else ()):
        found.setdefault(id(value), path)
    return {name: found[id(tensor)] for name, tensor in tensors.items() if id(tensor) in found}


def find_tensor(model: nn.Module, path: Path) -> Tensor | None:
    """The tensor that is now at ``path`` (as of `tensor_paths`), or None."""
    module, name, *keys = path
    try:
        value = getattr(model.get_submodule(module), name)
        value = at(vars(value) if keys and isinstance(value, Tensor) else value, keys)
    except (AttributeError, LookupError):
        return None
    return value if isinstance(value, Tensor) else None


def copy_guarded_attributes(
    guards: Collection[AttributeGuard],
    sources: Mapping[str, nn.Module],
    targets: Mapping[str, nn.Module],
    absent: Mapping[str, nn.Module],
) -> bool:
    """Set the guarded attributes of ``targets`` to the values that they have in ``sources`` now.

    Both map paths to modules; ``targets`` are copies of ``sources``. They keep their own tensors, also
    those in containers, and their own dicts and lists, which hooks may hold too. Modules that only one
    side has are left alone; those that only attributes of ``sources`` hold are ``absent``. Returns whether
    any attribute differed.
    """
    changed = False
    known = {**absent, **sources}
    for path, name in {(s.path, s.name): None for s in guards}:
        if path not in sources or path not in targets:
            continue
        now, then = _attribute(sources[path], name), _attribute(targets[path], name)
        if now is then or _are_alike(now, then):
            continue
        if Freezer(known).freeze(now) == Freezer(targets).freeze(then):
            continue
        own = dict(_tensors_in(then))
        kept: dict[int, Any] = {
            id(t): own[k] if k in own and _are_alike(t, own[k]) else t.detach()
            for k, t in _tensors_in(now)
        }
        kept |= {id(module): targets.get(path, module) for path, module in known.items()}
        value = copy.deepcopy(now, kept)
        if isinstance(then, dict) and isinstance(value, dict):
            then.clear()
            then.update(value)
        elif isinstance(then, list) and isinstance(value, list):
            then[:] = value
        else:
            _put(targets[path].__dict__, name, value)
        changed = True
    return changed


def _are_alike(one: Any, other: Any) -> bool:
    """Are they tensors of one shape and type?"""
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and (one.shape, one.dtype) == (other.shape, other.dtype)


@contextmanager
def guarded_attributes_restored(
    modules: Mapping[str, nn.Module], guards: Collection[AttributeGuard]
) -> Iterator[None]:
    """In this block, set the attributes of ``modules`` to the guards' values, where these are plain."""
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
    modules: Mapping[str, nn.Module],
    read: Callable[[str, str], None],
    copy_of: Callable[[nn.Module], nn.Module | None],
) -> Iterator[None]:
    """Call ``read(module path, name)`` for each attribute of ``modules`` that code reads in this block.

    That includes attributes that are missing, and parameters, buffers and submodules that are None,
    since they may be set later, and plain attributes of the class, since an instance may override
    them. It excludes other parameters, buffers and submodules, and methods. Reads through
    ``vars(module)`` go unnoticed. Where code reads or sets an attribute of another module, that of
    ``copy_of(module)`` is meant, unless this is None or the code runs in another thread.
    """
    paths, thread = {id(module): path for path, module in modules.items()}, threading.get_ident()

    def meant(module: nn.Module) -> nn.Module | None:
        return copy_of(module) if threading.get_ident() == thread else None

    def watching(
        cls: type[nn.Module], original: Callable[..., Any]
    ) -> Callable[[nn.Module, str], Any]:
        def getattribute(module: nn.Module, name: str) -> Any:
            if name in MODULE_TABLES and id(module) in paths:  # most are
                return original(module, name)
            if name.startswith("__"):
                return original(module, name)
            if id(module) not in paths:
                copied = meant(module)
                return original(module, name) if copied is None else getattr(copied, name)
            try:
                value = original(module, name)
            except AttributeError:
                if all(original(module, table).get(name) is None for table in _TABLES):
                    read(paths[id(module)], name)
                raise
            if name in original(module, "__dict__") or isinstance(
                getattr(cls, name, cls), PLAIN_VALUES
            ):
                read(paths[id(module)], name)
            return value

        return getattribute

    def set_attribute(original: Callable[..., None], module: nn.Module, *given: Any) -> None:
        original(meant(module) or module, *given)

    classes = {type(module) for module in modules.values()}
    with override_getattribute(classes, watching), override_setattr(set_attribute):
        yield


class _Same:
    """A wrapper that compares its value by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _attribute(module: nn.Module | None, name: str) -> Any:
    if module is None:
        return _ABSENT
    made = name in module.__dict__
    if not made and isinstance(getattr(type(module), name, None), functools.cached_property):
        return _ABSENT  # not made by looking
    try:
        return getattr(module, name, _ABSENT)
    except Exception:  # a property that raises
        return _ABSENT


class Freezer:
    """Converts values, as they are now, to forms that are equal if the values are equal.

    Tensors, containers and objects are numbered in the order in which they first appear, so that identity
    between several values counts too. Two freezers must therefore get the same attributes in the same
    order. ``modules`` are those of the model, by path; a module or its method is equal to that of the same
    path in a copy.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        # By id; the value is kept, so that its id is not used again.
        self._known: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._numbers: dict[int, int] = {}
        self._unread: set[int] = set()  # ids of containers whose items do not matter
        self._numbers_in: dict[int, set[Any]] = {}  # id of a container -> keys of numbers in it

    @functools.cached_property
    def _path_of(self) -> dict[int, str]:
        return {id(module): path for path, module in self._modules.items()}

    def freeze(
        self, value: Any, *, values_read: bool = False, unread: Collection[Path] = ()
    ) -> Any:
        """The form of ``value``; with ``values_read``, including the values of tensors.

        Of the containers and numbers at the paths ``unread`` in it, only the types matter.
        """
        for keys in unread:
            part = part_of(value, keys)
            if keys and type(part) in (int, float):
                self._numbers_in.setdefault(id(part_of(value, keys[:-1])), set()).add(keys[-1])
            elif part is not None:
                self._unread.add(id(part))
        key = id(value), values_read
        if key not in self._known:
            self._known[key] = value, self._freeze(value, DEPTH, values_read)
        return self._known[key][1]

    def _freeze(self, value: Any, depth: int, values_read: bool) -> Any:
        kind = type(value)
        if id(value) in self._unread:
            return kind
        if isinstance(value, PLAIN_VALUES):
            return kind, value
        if isinstance(value, Tensor):
            number = self._number(value)
            values = values_of(value) if values_read and not value.is_meta else None
            held = vars(value) if depth == DEPTH else {}  # what the user has set on it
            attributes = {name: self._attribute(x) for name, x in held.items()}
            return kind, value.shape, value.dtype, number, values, attributes
        if isinstance(value, ARRAYS):
            return kind, array_contents(value)
        if isinstance(value, set | frozenset):
            return kind, set(value)
        if isinstance(value, weakref.ref):  # recurrent layers of torch hold some of their weights
            return kind, self._freeze(value(), depth, values_read)
        if isinstance(value, nn.Module):
            path = self._path_of.get(id(value))
            return (kind, path) if path is not None else _Same(value)
        if isinstance(value, MethodType):
            return kind, value.__func__, self._freeze(value.__self__, depth, values_read)
        if isinstance(value, functools.partial):
            bound = value.func, value.args, value.keywords
            return kind, [self._freeze(item, depth, values_read) for item in bound]
        parts = _parts(value) if depth > 0 else None
        if parts is None:
            return _Same(value)
        depth, numbers = depth_inside(value, depth), self._numbers_in.get(id(value), ())
        place = None if isinstance(value, tuple) else self._number(value)
        items = [
            (key, type(item) if key in numbers else self._freeze(item, depth, values_read))
            for key, item in parts
        ]
        return kind, place, items

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(id(value), len(self._numbers))

    def _attribute(self, value: Any) -> Any:
        """The form of an attribute of a tensor."""
        return _Same(value) if isinstance(value, Tensor) else self._freeze(value, DEPTH - 2, False)


def values_of(tensor: Tensor) -> Any:
    """The values of ``tensor``, to compare; of a large one a hash, computed once per version."""
    if tensor.numel() <= _SMALL or tensor.is_inference():
        return tensor.tolist()
    version, known = _hashes.get(tensor, (-1, ""))
    if version != tensor._version:
        known = digest(tensor)
        _hashes[tensor] = tensor._version, known
    return known


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a container or the attributes of an object, with keys; None for other values."""
    if isinstance(value, nn.Module | type | FunctionType):
        return None
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    known = hasattr(value, "__dict__") or has_slots(value)
    return list(attributes_of(value).items()) if known else None


def part_of(value: Any, keys: Path) -> Any:
    try:
        return at(value, keys)
    except LookupError:
        return None


def depth_inside(value: Any, depth: int) -> int:
    """The depth that is left inside ``value``; objects count double, as they may refer to each other."""
    return depth - (1 if isinstance(value, dict | list | tuple) else 2)


def _tensors_in(value: Any, depth: int = DEPTH) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in ``value``, as deep as `Freezer` looks, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield (), value
    elif depth > 0 and not isinstance(value, (*PLAIN_VALUES, *ARRAYS, set, frozenset)):
        for key, item in _parts(value) or ():
            for keys, tensor in _tensors_in(item, depth_inside(value, depth)):
                yield (key, *keys), tensor
