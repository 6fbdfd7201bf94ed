"""Write down what forward left behind, as values that the program returns (`placer.program.stored`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from placer._torch import without_torch_function
from placer.program.failure import Untraceable
from placer.program.fake.sizes import RecordedNumber, plain
from placer.program.objects.paths import ARRAYS, MODULE_TABLES, Path, has_slots, spell, walk
from placer.program.objects.reachable import ReachableState, Reference
from placer.program.objects.restore import OF_ENTRIES, Change, Snapshot
from placer.program.recording.writer import GraphWriter
from placer.program.result import PLAIN, ModelPart, flatten_result, note_parts
from placer.program.stored import Stored

_TABLES = MODULE_TABLES - {
    *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A change by forward as a stored value, and its leaves as arguments for the graph's output node."""

    stored: Stored
    leaves: Sequence[Any]
    shapes: Sequence[Any]  # per leaf: the shape of a tensor, or the value
    change: Change | None  # None: of an input


class StoreFailure(Exception):
    """Something that forward leaves behind cannot be stored by a program; ``layer`` is the module's path."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(reason)
        self.layer = layer
        self.reason = reason  # begins with "it"


def find_parts(
    arguments: Iterable[tuple[Path, Any]], before: Snapshot, code: ReachableState
) -> Callable[[Any], ModelPart | None]:
    """A function that says of an object or container where it was before forward ran, if anywhere.

    ``before`` has the model, ``arguments`` are the roots of those of the call. Of what ``code`` reaches, it
    knows global variables and attributes of classes.
    """
    values = (Tensor, tuple, *PLAIN)
    given = {
        id(x): ModelPart(path, "call") for path, x in walk(arguments) if not isinstance(x, values)
    }
    variables = {
        id(each.value): ModelPart((), "code", each)
        for each in code.containers
        if isinstance(each.holder, type)
        or (type(each.holder) is dict and "__name__" in each.holder)
    }

    def part_of(value: Any) -> ModelPart | None:
        path = before.path_of(value)
        in_model = None if path is None else ModelPart(path)
        return given.get(id(value)) or in_model or variables.get(id(value))

    return part_of


def write_changes(
    changes: Iterable[Change],
    writer: GraphWriter,
    paths: Mapping[int, str],
    before: Snapshot,
    part_of: Callable[[Any], ModelPart | None],
) -> list[Left]:
    """The stored values for ``changes`` since ``before``; ``paths`` has the path of each module, by its id.

    Left out are hooks that forward installs with the flag that says so, since every call of the program
    computes what the first does; and what the code keeps for itself in variables, such as functions. Raises
    ``StoreFailure``.
    """
    found = []

    def place(change: Change) -> tuple[Any, ...]:
        is_entry = change.kind in OF_ENTRIES
        path = change.path[:-1] if is_entry else change.path
        return -len(change.path), change.root, is_entry, spell(path)

    # What is added to a list, before another list takes its place; entries of a dict as they were added
    changes = sorted(changes, key=place)
    hooks = [c for c in changes if c.root == "model" and c.path[1] in _TABLES]
    for change in changes:
        layer = change.path[0] if change.root == "model" else ""
        if change in hooks and change.kind == "delete":
            raise StoreFailure(layer, "it removes a hook")
        if change in hooks or (hooks and change.root == "model" and change.value is True):
            continue
        try:
            left = _write(change, writer, paths, before, part_of)
        except Untraceable as error:
            raise StoreFailure(layer, f"it sets {spell(change.path)}, but {error}") from error
        if left is not None:
            found.append(left)
    return found


def written_tensor(
    root: str, path: Path, node: fx.Node, tensor: Tensor, *, label: str = "", holder: Any = None
) -> Left:
    """That forward wrote to a tensor in place; ``node`` has its value in the end, ``tensor`` its shape."""
    stored = Stored(
        root=root,
        path=path,
        kind="write",
        format=flatten_result(None)[1],
        count=1,
        label=label,
        holder=holder,
    )
    with without_torch_function():
        return Left(stored=stored, leaves=[node], shapes=[tensor.shape], change=None)


def flag_of(root: str, path: Path, flag: bool) -> Left:
    """That forward lets a tensor require gradients, or not."""
    stored = Stored(root=root, path=path, kind="requires_grad", flag=flag)
    return Left(stored=stored, leaves=(), shapes=(), change=None)


def _write(
    change: Change,
    writer: GraphWriter,
    paths: Mapping[int, str],
    before: Snapshot,
    part_of: Callable[[Any], ModelPart | None],
) -> Left | None:
    if change.root == "model" and "_modules" in change.path[1:2]:
        raise Untraceable("that is a layer: make all layers before forward")
    if has_slots(change.holder) and not isinstance(change.holder, Reference):
        raise Untraceable("that is an attribute of an object that has __slots__")
    if isinstance(change.holder, ARRAYS):
        raise Untraceable("that is an array, of which it changes elements")
    holder = change.holder if change.root == "code" else None
    stored = Stored(root=change.root, path=change.path, kind=change.kind, holder=holder)
    if change.kind in ("delete", "move"):
        return Left(stored=stored, leaves=(), shapes=(), change=change)
    if isinstance(change.value, nn.Parameter) and not writer.is_state(change.value):
        raise Untraceable("that is a new parameter: make all parameters before forward")
    if isinstance(change.value, nn.Parameter) and "_parameters" in change.path[1:2]:
        raise Untraceable("that is a parameter of another layer: tie parameters before forward")

    def referred(leaf: Any) -> Any:
        if not isinstance(leaf, nn.Module):
            if type(leaf) is object:
                raise Untraceable("that is only equal to itself: use None, or a member of an Enum")
            path = before.path_of(leaf)
            return leaf if path is None else ModelPart(path)
        if id(leaf) not in paths:
            raise Untraceable("that holds a layer that the model does not have")
        return ModelPart((paths[id(leaf)],))

    def is_leaf(value: Any) -> bool:
        return isinstance(value, torch.Size) or before.path_of(value) is not None

    items = list(change.value) if change.kind in ("update", "items") else change.value
    value = tree_map(referred, items, is_leaf=is_leaf)
    try:
        leaves, form = flatten_result(value, lambda leaf: isinstance(leaf, RecordedNumber))
    except Untraceable:
        if change.root == "code":
            return None
        raise
    if change.root == "code" and not leaves and any(form.objects):
        return None
    if change.root != "code":
        form = note_parts(form, items, part_of)
    arguments = [x if isinstance(x, ModelPart) else writer.argument(x) for x in leaves]
    with without_torch_function():
        shapes = [x.shape if isinstance(x, Tensor) else plain(x) for x in leaves]
    return Left(
        stored=replace(stored, format=form, count=len(leaves)),
        leaves=arguments,
        shapes=shapes,
        change=change,
    )
