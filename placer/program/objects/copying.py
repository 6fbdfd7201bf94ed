"""Copies of modules: with other tensors, and with the user's own objects or with copies of them."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.hooks import RemovableHandle

from placer._torch import copy_attributes, hooks_of
from placer.errors import CaptureError
from placer.program.objects.hook_table import HookTable, hook_tables
from placer.program.objects.originals import note_originals
from placer.program.objects.paths import (
    MODULE_TABLES,
    function_parts,
    hidden_modules,
    module_parts,
    parts,
    spell,
    walk,
)


class Held(NamedTuple):
    """What the modules of a model hold.

    ``values`` are all objects but the modules, each once; ``empty`` has a new table for each empty one, by
    its id. Every module has a dozen empty tables, for hooks; to search or deep-copy them would take most of
    the time.
    """

    values: list[Any]
    empty: dict[int, Any]

    @classmethod
    def by(cls, model: nn.Module) -> Held:
        """What ``model`` holds."""
        empty = {
            id(value): type(value)()
            for module in model.modules()
            for name, value in vars(module).items()
            if name in MODULE_TABLES and type(value) in (dict, OrderedDict, set) and not value
        }
        known = empty.keys() | set(map(id, model.modules()))
        return cls([value for _, value in walk(module_parts(model), without=known)], empty)

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, buffers, and the tensors in attributes."""
        return [value for value in self.values if isinstance(value, Tensor)]


def copy_module(
    model: nn.Module,
    memo: Mapping[int, Any] | None = None,
    *,
    held: Held | None = None,
    keep_objects: bool = False,
) -> nn.Module:
    """A copy of ``model``; ``memo`` maps ids of its tensors to their replacements in the copy.

    ``held`` is what ``model`` holds, if the caller has looked already. It serves for one copy, which takes
    its new tables.

    With ``keep_objects`` the copy has the very objects of the user that ``model`` has: hooks; callables that
    stand for a ``forward``, unless they hold a part of the model; and whatever attributes hold (lists,
    configurations, trackers), unless there is a module or a tensor in it. Without, it has copies of them, so
    that nothing that it does is seen outside.

    Where ``copy.deepcopy`` would refuse, or keep what belongs to ``model``, this does not: tensors that a
    forward computed become clones; functions whose closures or defaults hold a part of ``model``, and weak
    references to one, get that part of the copy; an object that cannot be copied is kept; and a handle that
    removes a hook from ``model`` removes it from the copy (`HookTable`). Raises ``CaptureError``, which names
    the attribute, if that object holds a module or a parameter.
    """
    known = dict(memo or {})
    bound = (part for hook in _callables(model) for part in _bound(hook))
    kept = (x for _, x in walk(((), part) for part in bound) if isinstance(x, Tensor))
    held = held or Held.by(model)
    values = held.values
    for tensor in (*held.tensors, *kept):
        fake = isinstance(tensor, FakeTensor) and not isinstance(tensor, nn.Parameter)
        if (fake or tensor.grad_fn is not None) and id(tensor) not in known:
            known[id(tensor)] = tensor.detach().clone()
    known |= {id(value): value for value in values if type(value) is object}  # such as MISSING
    owned = _owned(model, values)
    if keep_objects:
        _keep(model, owned, known)
    known |= held.empty
    tables = [(table, HookTable(table)) for table in hook_tables(model)]
    twins = known | {id(table): twin for table, twin in tables}
    handles = [value for value in values if isinstance(value, RemovableHandle)]
    twins |= {id(handle): _handle_of(handle, twins) for handle in handles}
    try:
        copied, made = _deepcopy(model, twins, tables)
    except Exception:
        _keep_uncopyable(model, owned, known)
        copied, made = _deepcopy(model, known | twins, tables)
    for tensor in held.tensors:
        if isinstance(twin := made.get(id(tensor)), Tensor):  # torch copies no attributes
            copy_attributes(tensor, twin)
    _rebind(copied, made, set(map(id, known.values())), owned)
    if keep_objects:
        note_originals(model, copied)
    return copied


def _deepcopy(
    model: nn.Module,
    known: Mapping[int, Any],
    tables: Iterable[tuple[OrderedDict[int, Any], HookTable]],
) -> tuple[nn.Module, dict[int, Any]]:
    made = dict(known)
    copied = copy.deepcopy(model, made)
    for table, twin in tables:
        twin.update(copy.deepcopy(dict(table), made))
    return copied, made


def _handle_of(handle: RemovableHandle, twins: Mapping[int, Any]) -> RemovableHandle:
    """The handle for the same hook in the copy; ``copy.deepcopy`` refuses one whose module is gone."""

    def twin(reference: weakref.ref[Any]) -> weakref.ref[Any]:
        table = reference()
        return reference if table is None else weakref.ref(twins.get(id(table), table))

    made = RemovableHandle.__new__(RemovableHandle)
    made.id = handle.id
    made.hooks_dict_ref = twin(handle.hooks_dict_ref)
    made.extra_dict_ref = tuple(map(twin, handle.extra_dict_ref))
    return made


def _owned(model: nn.Module, held: Iterable[Any]) -> set[int]:
    """Ids of the modules and parameters of ``model``, which has ``held``, also of those that it hides."""
    modules = [*model.modules(), *(value for value in held if isinstance(value, nn.Module))]
    tensors = (x for m in modules for t in (m._parameters, m._buffers) for x in t.values())
    return {*map(id, modules), *(id(x) for x in tensors if x is not None)}


def _keep(model: nn.Module, owned: set[int], known: dict[int, Any]) -> None:
    """Add to ``known`` the objects that a copy shares with ``model``."""
    for module in model.modules():
        callables = hooks_of(module)
        forward = vars(module).get("forward")
        if not any(id(x) in owned for _, x in walk([((), forward)], functions=True)):
            callables.append(forward)
        for value in callables:
            owner = value.__self__ if isinstance(value, MethodType) else value
            if isinstance(owner, functools.partial):
                for _, given in function_parts(owner):
                    if not any(id(x) in owned for _, x in walk([((), given)], functions=True)):
                        known[id(given)] = given
            elif not isinstance(owner, FunctionType) and id(owner) not in owned:
                known[id(owner)] = owner
    found: dict[int, bool] = {}
    for (_, name), value in module_parts(model):
        if name not in MODULE_TABLES:
            _keep_without_state(value, owned, known, found)


def is_tree(model: nn.Module) -> bool:
    """Does nothing but the tables of modules refer to a module or parameter: no hook, no other attribute?"""
    if any(value is not None for value in _callables(model)):
        return False
    owned = _owned(model, hidden_modules(model).values())
    held = [((), value) for (_, name), value in module_parts(model) if name not in MODULE_TABLES]
    return not any(
        id(x) in owned or isinstance(x, weakref.ref) for _, x in walk(held, functions=True)
    )


def _callables(model: nn.Module) -> Iterator[Any]:
    """The hooks of all modules, and what stands for a ``forward``."""
    for module in model.modules():
        yield vars(module).get("forward")
        yield from hooks_of(module)


def _bound(value: Any) -> Iterator[Any]:
    """The objects that a ``partial`` or a bound method is copied with."""
    if isinstance(value, MethodType | functools.partial):
        for _, part in function_parts(value):
            yield from _bound(part)
    elif not isinstance(value, FunctionType | nn.Module):
        yield value


def _keep_without_state(
    value: Any, owned: set[int], known: dict[int, Any], found: dict[int, bool]
) -> bool:
    """Keep the largest objects in ``value`` that hold no module and no tensor. Does ``value`` hold any?

    ``found`` has the answers so far, by id.
    """
    if id(value) in owned or isinstance(value, Tensor):
        return True
    if id(value) in known:
        return False
    if id(value) not in found:
        found[id(value)] = False  # for an object that holds itself
        if isinstance(value, weakref.ref):
            found[id(value)] = id(value()) in owned
            return found[id(value)]
        inside = [part for _, part in (*parts(value), *function_parts(value))]
        if isinstance(value, _WEAK):
            inside += list(value)
        elif isinstance(value, dict) and not owned.isdisjoint(_ids(value)):
            return True
        holding = [part for part in inside if _keep_without_state(part, owned, known, found)]
        found[id(value)] = bool(holding)
        if not found[id(value)] and not isinstance(value, tuple | FunctionType):
            known[id(value)] = value
    return found[id(value)]


def _keep_uncopyable(model: nn.Module, owned: set[int], known: dict[int, Any]) -> None:
    """Add to ``known`` the objects in attributes that cannot be copied."""
    for path, value in walk((p, v) for p, v in module_parts(model) if p[1] not in MODULE_TABLES):
        if isinstance(value, Tensor | nn.Module) or id(value) in known:
            continue
        try:
            copy.deepcopy(value, dict(known))
        except Exception as error:
            if any(True for _ in parts(value)):
                continue  # the fault is in one of its parts
            if any(id(x) in owned for _, x in walk([((), value)], functions=True)):
                raise CaptureError(
                    spell(path),
                    f"cannot be copied ({type(error).__name__}: {error}) and holds a part of the model",
                    "give the object a __deepcopy__, or create it in forward",
                ) from error
            known[id(value)] = value


_WEAK = (weakref.WeakKeyDictionary, weakref.WeakSet)


def _ids(table: dict[Any, Any]) -> list[int]:
    """The keys of a dict that may be ids of objects."""
    return [key for key in table if type(key) is int]


def _rebind_keys(value: Any, made: Mapping[int, Any], owned: set[int]) -> None:
    """Replace keys that are, weakly or by their ids, modules or parameters of the model."""
    if isinstance(value, weakref.WeakSet):
        for key in [key for key in value if id(key) in owned]:
            value.discard(key)
            value.add(made[id(key)])
    elif isinstance(value, weakref.WeakKeyDictionary):
        for key in [key for key in value if id(key) in owned]:
            value[made[id(key)]] = value.pop(key)
    elif isinstance(value, dict) and not owned.isdisjoint(_ids(value)):
        items = [(id(made[k]) if k in owned else k, item) for k, item in value.items()]
        value.clear()
        value.update(items)


def _rebind(copied: nn.Module, made: Mapping[int, Any], kept: set[int], owned: set[int]) -> None:
    """Let functions, weak references and keys in the copy refer to the copy, where they did to the model."""
    rebind = _Rebinding(made)
    modules = list(copied.modules())
    others = walk(module_parts(copied), without=kept.union(map(id, modules)))
    for value in (*modules, *(value for _, value in others)):
        _rebind_keys(value, made, owned)
        table = value if isinstance(value, dict | list) else getattr(value, "__dict__", None)
        if not isinstance(table, dict | list) or isinstance(
            value, type | FunctionType | RemovableHandle
        ):
            continue
        for key, part in list(table.items() if isinstance(table, dict) else enumerate(table)):
            if isinstance(part, FunctionType | MethodType | functools.partial | weakref.ref):
                bound = rebind(part)
                if bound is not part:
                    table[key] = bound


class _Rebinding:
    """Makes functions that refer to copies; ``memo`` maps ids of objects to their copies."""

    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo
        self._cells: dict[int, CellType] = {}  # several functions may share a cell

    def __call__(self, value: Any) -> Any:
        """The copy of ``value``, or ``value`` itself if neither it nor anything inside it was copied."""
        if isinstance(value, weakref.ref):
            target = self._memo.get(id(value()))
            return value if target is None else weakref.ref(target)
        if isinstance(value, MethodType):
            owner = self(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            args = tuple(map(self, value.args))
            keywords = {name: self(x) for name, x in value.keywords.items()}
            before = (value.func, *value.args, *value.keywords.values())
            if self._same((self(value.func), *args, *keywords.values()), before):
                return value
            return functools.partial(self(value.func), *args, **keywords)
        if not isinstance(value, FunctionType):
            return self._memo.get(id(value), value)
        cells = tuple(map(self._cell, value.__closure__ or ()))
        defaults = tuple(map(self, value.__defaults__ or ()))
        keywords = {name: self(default) for name, default in (value.__kwdefaults__ or {}).items()}
        before = value.__closure__ or (), value.__defaults__ or (), value.__kwdefaults__ or {}
        if self._same(
            (*cells, *defaults, *keywords.values()), (*before[0], *before[1], *before[2].values())
        ):
            return value
        made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        made.__kwdefaults__ = keywords or None
        made.__qualname__ = value.__qualname__
        made.__dict__.update(value.__dict__)
        return made

    @staticmethod
    def _same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
        return all(a is b for a, b in zip(now, before, strict=True))

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) not in self._cells:
            self._cells[id(cell)] = cell  # for a function that refers to itself
            try:
                content = cell.cell_contents
            except ValueError:  # it is empty
                return cell
            copied = self(content)
            if copied is not content:
                self._cells[id(cell)] = CellType(copied)
        return self._cells[id(cell)]
