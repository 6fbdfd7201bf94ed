"""What forward leaves behind besides its result, and how a call of the placed model leaves the same.

A program returns the values that forward stores (in attributes, containers, variables, inputs) like further
results. After the call they are put where forward would have put them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from placer.program.fake.packed import unflatten
from placer.program.objects.paths import Path, at, spell
from placer.program.objects.reachable import Reference
from placer.program.objects.restore import MISSING, OF_ENTRIES, Kind, set_items
from placer.program.result import ModelPart, ResultFormat
from placer.program.rows.batch import BatchDim


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One thing that forward leaves behind.

    ``root`` says where ``path`` begins: at a module of the model (its path), at an argument of the call (its
    name), at a tensor among the inputs (its number), or at what the code can reach, which is ``holder``.
    Besides the kinds of a `Change` there are "write", for a tensor that is written in place, and
    "requires_grad", for one whose flag becomes ``flag`` before forward uses it. ``format`` rebuilds the value
    from ``count`` of the program's results.
    """

    root: str  # "model", "call", "input" or "code"
    path: Path
    kind: Kind | Literal["write", "requires_grad"]
    format: ResultFormat | None = None
    count: int = 0
    flag: bool | None = None
    label: str = ""  # the name of an input
    holder: Any = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """What it is called in a spec and in messages, such as ``encoder.loss``."""
        return self.label or spell(self.path)

    @property
    def leaf_names(self) -> list[str]:
        """The names of its leaves."""
        names = () if self.format is None else self.format.names
        return [f"{self.name}.{name}".rstrip(".") for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInput:
    """An input of a program that is no tensor among the arguments of the call.

    Such are tensors that forward stores and reads in the next call, and numbers that change: in attributes of
    the model, in variables of its code, and among the arguments.
    """

    name: str
    path: Path = ()  # in the model: module path, attribute, keys
    argument: str = ""  # the name of a leaf of the arguments
    variable: Reference | None = field(default=None, compare=False)
    tensor: Tensor | None = field(default=None, compare=False)  # a tensor of the code's own
    batch_dim: BatchDim = None
    kind: type = Tensor  # or int, float

    def read(self, model: nn.Module, leaves: Mapping[str, Any]) -> Any:
        """The present value, for a call with these leaves by name; None if there is none of this kind."""
        if self.tensor is not None:
            return self.tensor
        if self.argument:
            value = leaves.get(self.argument)
        elif self.variable is not None:
            value = self.variable.read()
        else:
            try:
                value = at(vars(model.get_submodule(self.path[0])), self.path[1:])
            except (AttributeError, LookupError):
                return None
        matches = isinstance(value, Tensor) if self.kind is Tensor else type(value) is self.kind
        return value if matches else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the values that a call stores belong: the model, and the call's own arguments and inputs.

    Without ``arguments`` there is no caller, and only the model is changed.
    """

    model: nn.Module
    arguments: Mapping[str, Any] | None = None
    inputs: Sequence[Any] = ()

    def with_parts(self, form: ResultFormat, value: Any) -> Any:
        """``value``, which ``form`` has rebuilt, with the very objects that were there before, or copies."""
        if form.outer is None:
            return value
        found = form.outer.flatten_up_to(value)
        for index, part in enumerate(form.parts):
            with suppress(AttributeError, LookupError):
                found[index] = found[index] if part is None else self.part(part)
        return unflatten(found, form.outer)

    def part(self, part: ModelPart) -> Any:
        """The object for which ``part`` stands."""
        if part.variable is not None:
            return part.variable.read()
        if part.root == "call":
            return at(self.arguments or {}, part.path)
        module, *path = part.path
        model = self.model.get_submodule(module)
        return at(vars(model), path) if path else model


def store(stored: Sequence[Stored], leaves: Sequence[Any], target: Target) -> Callable[[], None]:
    """Leave behind what forward would have left. Returns a function that undoes it, but not for tensors.

    ``leaves`` are the stored values, in the order of ``stored``. What belongs to modules that the model
    lacks, as on a rank that has a part of it, is left out.
    """
    rest, undo, values = list(leaves), ExitStack(), []
    for each in stored:
        own, rest = rest[: each.count], rest[each.count :]
        if not is_there(each, target):
            continue
        own = [target.part(leaf) if isinstance(leaf, ModelPart) else leaf for leaf in own]
        form = each.format
        values.append((each, form and target.with_parts(form, form.unflatten(own))))
    for each, value in values:  # after all parts of the model were found where they were
        undo.callback(_store(each, value, target))
    return undo.close


def set_flags(stored: Sequence[Stored], target: Target) -> None:
    """Let inputs and parameters require gradients, or not, as forward does before it uses them."""
    for each in stored:
        if each.flag is not None and is_there(each, target):
            holder, path = _holder(each, target)
            at(holder, path).requires_grad_(each.flag)


def is_there(each: Stored, target: Target) -> bool:
    """Does the target have what ``each`` changes?"""
    if each.root in ("call", "input"):
        return target.arguments is not None
    try:
        return each.root == "code" or target.model.get_submodule(each.path[0]) is not None
    except AttributeError:
        return False


def table_at(model: nn.Module, path: Path) -> Any:
    """The dict or list in which ``model`` holds what is at ``path``, at the last key of the path."""
    table = at(vars(model.get_submodule(path[0])), path[1:-1])
    return table if isinstance(table, dict | list | deque) else vars(table)


def set_at(model: nn.Module, path: Path, value: Any) -> None:
    """Put ``value`` at ``path`` in ``model``; a tuple that holds it is replaced."""
    holder = at(vars(model.get_submodule(path[0])), path[1:-1])
    if isinstance(holder, tuple):
        items = [*holder[: path[-1]], value, *holder[path[-1] + 1 :]]
        made = type(holder)(*items) if hasattr(holder, "_fields") else tuple(items)
        set_at(model, path[:-1], made)
    else:
        table_at(model, path)[path[-1]] = value


def _store(each: Stored, value: Any, target: Target) -> Callable[[], object]:
    holder, path = _holder(each, target)
    if each.kind == "write":
        with torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad):
            at(holder, path).copy_(value)
        return lambda: None
    if each.kind == "requires_grad":  # `set_flags`
        return lambda: None
    if isinstance(holder, Reference):
        before = holder.read()
        holder.write(value)
        return partial(holder.write, before)
    if each.kind in OF_ENTRIES:
        table, key = at(holder, path[:-1]), path[-1]
        table = table if isinstance(table, dict | list | deque) else vars(table)
        if each.kind == "move":
            return _move_to_end(table, key)
        return _store_entry(table, key, value, deleted=each.kind == "delete")
    items = at(holder, path)
    kept = [*items]
    if each.kind == "extend":
        items.extend(value)
    elif each.kind == "update":
        items.update(value)
    else:
        set_items(items, value)
    return partial(set_items, items, kept)


def _holder(each: Stored, target: Target) -> tuple[Any, Path]:
    """The object at which the path of ``each`` begins, and the rest of the path."""
    if each.root == "model":
        return vars(target.model.get_submodule(each.path[0])), each.path[1:]
    if each.root == "call":
        return target.arguments, each.path
    if each.root == "input":
        return list(target.inputs), each.path
    return each.holder, each.path[1:]


def _move_to_end(table: Any, key: Any) -> Callable[[], object]:
    before = dict(table)
    if key in table:  # a rank may lack a tensor
        table[key] = table.pop(key)
    return lambda: (table.clear(), table.update(before))


def _store_entry(table: Any, key: Any, value: Any, *, deleted: bool) -> Callable[[], object]:
    before = table[key] if not isinstance(table, dict) or key in table else MISSING
    if deleted:
        del table[key]
    else:
        if (
            isinstance(value, Tensor)
            and isinstance(before, Tensor)
            and before.device.type != "meta"
        ):
            value = value.to(before.device)  # a buffer stays where it is
        table[key] = value
    if before is MISSING:
        return partial(table.pop, key, None)
    return partial(table.__setitem__, key, before)
