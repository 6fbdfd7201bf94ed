"""Find the cached functions, global variables and containers that the code of a model can reach.

The search follows the names that the model's functions use, in their modules, classes and closures, and
continues from the functions that it finds. It skips code of torch, of the standard library, and of installed
packages that do not use torch: testing and logging tools, whose own state is not that of the model.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import os
import queue
import re
import sys
import sysconfig
import threading
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn

from placer._torch import ALL_HOOK_TABLES
from placer.program.failure import OWN_FOLDER, TORCH_FOLDER
from placer.program.objects.hook_table import HookTable
from placer.program.objects.paths import (
    ARRAYS,
    BOUND,
    MODULE_TABLES,
    Path,
    at,
    attributes_of,
    has_slots,
    is_object,
    spell,
)
from placer.program.objects.python_random import GENERATORS

CACHED: type = type(functools.lru_cache(lambda: None))
_STDLIB = sysconfig.get_paths()["stdlib"]
_FOREIGN = tuple(map(os.path.normcase, (TORCH_FOLDER, OWN_FOLDER, _STDLIB + os.sep)))
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
_FOREIGN_CLASSES = ("torch", "builtins", "typing", "collections", "placer", "numpy")
_BOUND = (*BOUND, functools.partial)
_CODE = (FunctionType, type, tuple, *_BOUND)
_CONTAINERS = (dict, list, set, deque, OrderedDict, defaultdict, Counter, HookTable)
_ATOMS = (Tensor, str, bytes, int, float, type(None))
_VALUES = (Tensor, str, int, float, type(None))  # of variables that are looked after
_CALLABLES = (FunctionType, BuiltinFunctionType, functools.partial)
# Classes of the standard library whose objects hold the user's values; its other objects are not searched.
_HOLDERS = (
    *(SimpleNamespace, argparse.Namespace, threading.local),
    *(ChainMap, UserDict, UserList, queue.Queue),
)
_NONE: Mapping[str, Any] = {}


# The value of a global variable that a function assigns, but that does not exist yet; it is read as None.
UNDEFINED = object()


def _itself(function: Any) -> Any:
    return function


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a value is stored: a key of a dict or list, a cell of a closure, or an attribute of a class.

    The key of a cell is the name of its variable, that of a function's default the parameter. ``keys`` lead
    from there into containers and objects. ``code`` is that of the function which names the variable.
    """

    holder: Any
    key: Any
    value: Any
    wrap: Callable[[Any], Any] = _itself  # staticmethod or classmethod, for an attribute of a class
    code: CodeType | None = None
    keys: Path = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        return self

    def read(self) -> Any:
        """The current value, or None."""
        try:
            if self.is_fixed:
                held = self.value
            elif isinstance(self.holder, CellType):
                held = self.holder.cell_contents
            elif isinstance(self.holder, ContextVar):
                held = self.holder.get()
            elif isinstance(self.holder, type):
                held = vars(self.holder)[self.key]
                held = getattr(held, "__func__", held)
            elif isinstance(self.holder, FunctionType):
                held = _defaults(self.holder)[self.key]
            else:
                held = self.holder[self.key]
            return at(held, self.keys)
        except (LookupError, ValueError):
            return None

    @property
    def is_fixed(self) -> bool:
        """Can no other value be stored there? So it is with what a method is bound to, and in tuples."""
        return self.holder is None or isinstance(self.holder, _BOUND)

    @property
    def name(self) -> str:
        """The name of the variable, for messages."""
        name = str(self.key)
        if isinstance(self.holder, type):
            name = f"{self.holder.__qualname__}.{name}"
        elif isinstance(self.holder, (FunctionType, *_BOUND)):
            name = f"{getattr(self.holder, '__name__', 'partial')}({name})"
        elif isinstance(self.holder, dict) and "__name__" in self.holder:
            name = f"{self.holder['__name__']}.{name}"
        return spell((name, *self.keys))

    def write(self, value: Any) -> None:
        """Store ``value``."""
        if self.keys:
            table = replace(self, keys=self.keys[:-1]).read()
            table = table if isinstance(table, dict | list | deque) else vars(table)
            table[self.keys[-1]] = value
        elif isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, ContextVar):
            self.holder.set(value)
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, self.wrap(value))
        elif isinstance(self.holder, FunctionType):
            defaults = _defaults(self.holder) | {self.key: value}
            keywords = self.holder.__kwdefaults__ or {}
            if self.key in keywords:
                self.holder.__kwdefaults__ = keywords | {self.key: value}
            else:
                self.holder.__defaults__ = tuple(
                    v for k, v in defaults.items() if k not in keywords
                )
        elif value is None and self.value is UNDEFINED:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


@dataclass(slots=True)
class ReachableState:
    """The state that the code of modules can reach.

    ``cached`` are references to ``functools.lru_cache`` functions, ``variables`` those of variables (global,
    of a closure, or of a class) that are None, tensors, numbers, strings, containers or objects,
    ``containers`` those of dicts, lists and sets, and of objects in variables, ``objects`` those of variables
    that are objects, ``codes`` the code of functions, and ``classes`` the classes that each function names or
    belongs to, by its code. ``generators`` are those of random numbers, of Python and numpy, ``iterators``
    those of variables that hold an iterator. ``spaces`` are the modules' tables of
    global variables, and the classes.
    """

    cached: list[Reference] = field(default_factory=list)
    variables: list[Reference] = field(default_factory=list)
    containers: list[Reference] = field(default_factory=list)
    objects: list[Reference] = field(default_factory=list)
    codes: list[CodeType] = field(default_factory=list)
    classes: list[tuple[CodeType, type]] = field(default_factory=list)
    generators: list[Reference] = field(default_factory=list)
    iterators: list[Reference] = field(default_factory=list)
    spaces: list[Any] = field(default_factory=list)

    def extend(self, other: ReachableState) -> None:
        """Add everything in ``other``."""
        self.cached += other.cached
        self.variables += other.variables
        self.containers += other.containers
        self.objects += other.objects
        self.codes += other.codes
        self.classes += other.classes
        self.generators += other.generators
        self.iterators += other.iterators
        self.spaces += other.spaces

    def read_by(self, codes: Collection[CodeType]) -> list[Reference]:
        """The variables that functions with these ``codes`` name.

        Attributes of a class count if one of them names the class or an object of it, or is a method of it;
        methods also if one of them is that method's.
        """
        # By identity: generated methods of different classes are equal. What is given has no code.
        ran = {id(None), *map(id, codes)}
        names = {name for code in codes for name in code.co_names}
        classes = {base for code, kind in self.classes if id(code) in ran for base in kind.__mro__}
        found = {
            (id(each.holder), each.key): each
            for each in self.variables
            if (
                (each.holder in classes and each.key in names)
                or (each.code is not None and id(each.code) in ran)
                if isinstance(each.holder, type)
                else id(each.code) in ran
            )
        }
        return list(found.values())

    def defines(self, code: CodeType | None) -> bool:
        """Does the code define a function with this ``code`` inside another one?"""
        return code is not None and any(
            code in outer.co_consts for each in self.codes for outer in _nested(each)
        )


def find_reachable_state(model: nn.Module, arguments: Mapping[str, Any] = _NONE) -> ReachableState:
    """Search from the classes and attributes of the modules of ``model``; takes a few milliseconds.

    And from the functions and objects among ``arguments``, by name.
    """
    search = _Search(frozenset(map(id, model.modules())))
    for name, value in arguments.items():
        search.variable(arguments, name, value)
    for module in model.modules():
        search.add(type(module))
        for key, value in vars(module).items():
            if key not in MODULE_TABLES or (key in ALL_HOOK_TABLES and value):
                search.look(vars(module), key, value)
    search.run()
    return search.found


class _Search:
    def __init__(self, own: frozenset[int]) -> None:
        self.found = ReachableState()
        self._own = own  # ids of the model's modules
        self._seen: set[int] = set()
        self._searched: set[tuple[int, int]] = set()  # ids of modules and the codes that name them
        self._alive: list[Any] = []  # keeps the ids in _seen valid
        self._waiting: list[Any] = []

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._alive.append(value)
        return True

    def add(self, value: Any) -> None:
        if self._is_new(value):
            self._waiting.append(value)

    def look(self, holder: Any, key: Any, value: Any, wrap: Callable[[Any], Any] = _itself) -> None:
        """Examine ``value``, which ``holder`` stores at ``key``. Without a holder, it cannot be replaced."""
        if type(value) is CACHED:
            wrapped = getattr(value, "__wrapped__", None)
            if hasattr(wrapped, "__code__") and _is_foreign(wrapped):
                return
            if holder is not None:
                self.found.cached.append(Reference(holder, key, value, wrap))
            self.add(wrapped)
        elif isinstance(value, _CODE):
            self.add(value)
        elif type(value) in _CONTAINERS:
            if self._is_new(value):
                self._waiting.append(value)
                self.found.containers.append(Reference(holder, key, value))
        elif isinstance(value, ARRAYS):
            if self._is_new(value):
                self.found.containers.append(Reference(holder, key, value))
        elif isinstance(value, GENERATORS):
            if self._is_new(value):
                self.found.generators.append(Reference(holder, key, value))
        elif not isinstance(value, (ModuleType, *_ATOMS)):
            self.add(type(value))
            if self._is_searched(value):
                self._object(Reference(holder, key, value))

    def run(self) -> None:
        while self._waiting:
            value = self._waiting.pop()
            if isinstance(value, type):
                self._class(value)
            elif isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, _BOUND):
                self._bound(value)
            elif isinstance(value, dict):
                for key, item in list(value.items()):
                    self.look(value, key, item)
            elif isinstance(value, list | set | deque):
                for index, item in enumerate(value):
                    self.look(value if isinstance(value, list) else None, index, item)
            elif isinstance(value, tuple):
                for index, item in enumerate(value):
                    self.look(None, f"item {index} of a tuple", item)

    def _bound(self, value: Any) -> None:
        """Search a bound method or a ``partial``: its function, and the objects that it is bound to."""
        function: Any
        held: list[tuple[Any, Any]]
        if isinstance(value, functools.partial):
            function, held = value.func, [*enumerate(value.args), *value.keywords.items()]
        else:
            function, held = getattr(value, "__func__", None), [("self", value.__self__)]
        self.look(None, None, function)
        for key, part in held:
            self.variable(value, key, part, getattr(function, "__code__", None))

    def _class(self, cls: type) -> None:
        module = sys.modules.get(str(cls.__module__))  # of a metaclass of Cython it is a descriptor
        if _root(cls) in _FOREIGN_CLASSES or _is_without_torch(module):
            return
        if not _is_foreign(module):
            self.found.spaces.append(cls)
        for base in (*cls.__mro__[1:], type(cls)):
            self.add(base)
        for name, value in list(vars(cls).items()):
            if isinstance(value, staticmethod | classmethod):
                self.look(cls, name, value.__func__, type(value))
            elif isinstance(value, property):
                for function in (value.fget, value.fset, value.fdel):
                    self.look(None, None, function)
            elif isinstance(value, functools.cached_property):
                self.look(None, None, value.func)
            elif isinstance(value, FunctionType):
                if value.__code__.co_qualname.startswith(f"{cls.__qualname__}."):
                    self.found.classes.append((value.__code__, cls))
                self.look(cls, name, value)
                self.found.variables.append(Reference(cls, name, value, code=value.__code__))
            elif not name.startswith("__"):
                self.variable(cls, name, value)

    def _function(self, function: FunctionType) -> None:
        self.found.codes.append(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                self.variable(cell, name, cell.cell_contents, function.__code__)
            except ValueError:  # it is empty
                continue
        # A decorator of such code holds what it decorates in its closure
        if _is_unrelated(function):
            return
        for name, value in _defaults(function).items():
            if isinstance(value, Tensor) or not isinstance(value, _ATOMS):
                self.variable(function, name, value, function.__code__)
        space = function.__globals__
        # Cached functions may also be read in other ways, such as globals()[name]
        if self._is_new(space):
            self.found.spaces.append(space)
            for name, value in list(space.items()):
                if type(value) is CACHED:
                    self.look(space, name, value)
        named, stored = _globals_of(function.__code__)
        for name in named & space.keys():
            value = space[name]
            if isinstance(value, ModuleType):
                self._module(value, set(_names(function.__code__)), function.__code__)
            else:
                self.variable(space, name, value, function.__code__)
        for name in stored - space.keys():
            self.found.variables.append(Reference(space, name, UNDEFINED, code=function.__code__))

    def variable(self, holder: Any, key: Any, value: Any, code: CodeType | None = None) -> None:
        self.look(holder, key, value)
        reference = Reference(holder, key, value, code=code)
        if code is not None and not isinstance(value, (*_ATOMS, *_CONTAINERS)):
            self.found.classes.append((code, value if isinstance(value, type) else type(value)))
        if isinstance(holder, enum.EnumMeta):
            return
        if isinstance(value, ContextVar):
            self.variable(value, value.name, Reference(value, "", None).read(), code)
        elif is_iterator(value):
            self.found.iterators.append(reference)
        elif isinstance(value, enum.Enum) or type(value) in (*_CONTAINERS, *ARRAYS, tuple):
            self.found.variables.append(reference)
        elif is_object(value) or has_slots(value):
            self.found.objects.append(reference)
            if self._is_searched(value) or isinstance(value, nn.Module):
                self.found.variables.append(reference)
        elif isinstance(value, FunctionType) and not _is_unrelated(value):
            self._attributes_of_function(reference)
        elif isinstance(value, (*_VALUES, *_CALLABLES)):
            self.found.variables.append(reference)

    def _attributes_of_function(self, reference: Reference) -> None:
        """Note the function of ``reference``: code that names it may keep values in its attributes."""
        function = reference.value
        self.found.variables.append(reference)
        self.found.containers.append(Reference(None, reference.key, function))
        for name, part in list(vars(function).items()):
            self.look(vars(function), name, part)

    def _is_searched(self, value: Any) -> bool:
        """Is it an object whose attributes count: of a user's class, or of one that holds settings?"""
        if not (is_object(value) or has_slots(value)) or id(value) in self._own:
            return False
        module = sys.modules.get(type(value).__module__)
        return isinstance(value, _HOLDERS) or not (module is None or _is_foreign(module))

    def _object(self, reference: Reference) -> None:
        if not self._is_new(reference.value):
            return
        self.found.containers.append(reference)
        table = attributes_of(reference.value)
        for name, part in list(table.items()):
            self.look(None if has_slots(reference.value) else table, name, part)

    def _module(self, module: ModuleType, names: set[str], code: CodeType) -> None:
        if _is_unrelated(module):
            return
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                if (id(value), id(code)) not in self._searched:
                    self._searched.add((id(value), id(code)))
                    self._module(value, names, code)
            else:
                self.variable(vars(module), name, value, code)


def is_iterator(value: Any) -> bool:
    """Is it a generator, or an iterator of Python's library, whose position cannot be seen?"""
    kind = type(value)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def _defaults(function: FunctionType) -> dict[str, Any]:
    """The default values of parameters, by name; not those that a decorator kept for its ``*args``."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    found = dict(zip(reversed(names), reversed(values), strict=False))
    return dict(reversed(found.items())) | (function.__kwdefaults__ or {})


def _nested(code: CodeType) -> Iterator[CodeType]:
    """``code`` and the code of all functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _names(code: CodeType) -> Iterator[str]:
    return (name for inner in _nested(code) for name in inner.co_names)


@functools.cache
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global variables that ``code``, or a function in it, names, and those to which it assigns.

    ``co_names`` has the names of attributes, too.
    """
    found = [x for inner in _nested(code) for x in dis.get_instructions(inner)]
    named = (x for x in found if x.opcode in dis.hasname and x.opname not in _OF_ATTRIBUTES)
    stored = (x for x in found if x.opname == "STORE_GLOBAL")
    return frozenset(str(x.argval) for x in named), frozenset(str(x.argval) for x in stored)


_OF_ATTRIBUTES = {name for name in dis.opmap if name.endswith(("_ATTR", "_METHOD"))}


def _is_foreign(value: Any) -> bool:
    """Does it belong to torch, placer or the standard library, or has it no Python source?"""
    file = _file(value)
    package = _INSTALLED.search(file)
    return not file or (
        file.startswith(_FOREIGN) and (package is None or package[1] in ("torch", "placer"))
    )


def _is_unrelated(value: Any) -> bool:
    """Is it foreign, or of an installed package that does not use torch?"""
    return _is_foreign(value) or _is_without_torch(value)


def _is_without_torch(value: Any) -> bool:
    """Is it of an installed package that does not use torch?"""
    package = _INSTALLED.search(_file(value))
    return package is not None and not _uses_torch(package[1], len(sys.modules))


def _file(value: Any) -> str:
    if isinstance(value, ModuleType):
        file = getattr(value, "__file__", None)
    else:
        file = getattr(getattr(value, "__code__", None), "co_filename", None)
    return os.path.normcase(file or "")


@functools.lru_cache
def _uses_torch(package: str, imported: int) -> bool:
    """Does a module of ``package`` that has been ``imported`` name torch, or something of it?"""
    modules = [x for name, x in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]
    return any(
        isinstance(value, ModuleType | type | FunctionType) and _root(value) == "torch"
        for module in modules
        for value in list(getattr(module, "__dict__", {}).values())
    )


def _root(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(name).partition(".")[0]
