"""Flatten the result of ``forward``, which may be any Python object, to a list of leaves, and rebuild it."""

from __future__ import annotations

import enum
import io
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from placer.errors import CaptureError
from placer.operands import leaves_with_paths
from placer.program.failure import Untraceable
from placer.program.fake.packed import unflatten
from placer.program.objects.paths import Path
from placer.program.objects.reachable import Reference

PLAIN = (  # types whose values may be arguments of a node as they are
    str,
    int,
    float,
    bool,
    complex,
    bytes,
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Stands for an object that the model has at ``path``, in a value.

    The path begins with that of a module, and may lead into its attributes. Besides, for an object among
    the arguments of the call (``root`` is "call": the path begins with the name of an argument), or one in a
    ``variable`` of the model's code ("code").
    """

    path: Path
    root: str = "model"
    variable: Reference | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedObject:
    """An object that pytree does not flatten, such as a key-value cache, pickled without its tensors.

    Its tensors and sizes are leaves of the flat list. ``classes`` are classes that pickle cannot find by
    name, because they are defined inside functions. ``seen_by_loss`` says whether a loss is assumed to read
    its tensors: it is for a dataclass, and for other objects if the result has no floating-point tensor
    outside of objects.
    """

    data: bytes  # the pickle
    leaves: int  # how many leaves belong to it
    seen_by_loss: bool
    classes: tuple[type, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFormat:
    """How to rebuild what ``forward`` returned from a flat list of leaves."""

    spec: TreeSpec
    objects: tuple[PackedObject | None, ...]  # per leaf of ``spec``: an object, or None: itself
    # Per leaf of the flat list, such as "0.loss"; "" for a result that is one leaf
    names: tuple[str, ...]
    # The leaves of ``outer`` that were there before forward ran; None for others
    parts: tuple[ModelPart | None, ...] = ()
    outer: TreeSpec | None = None

    def visible(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that a loss is assumed to read: all except those of objects such as caches."""
        found, rest = [], list(leaves)
        for packed in self.objects:
            count = 1 if packed is None else packed.leaves
            found += rest[:count] if packed is None or packed.seen_by_loss else []
            rest = rest[count:]
        return found

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The result of ``forward`` with these leaves."""
        values, rest = [], list(leaves)
        for packed in self.objects:
            count = 1 if packed is None else packed.leaves
            values.append(rest[0] if packed is None else _Unpickler(packed, rest[:count]).load())
            rest = rest[count:]
        return unflatten(values, self.spec)


def flatten_result(
    result: Any, is_leaf: Callable[[Any], bool] = lambda _: False
) -> tuple[list[Any], ResultFormat]:
    """The leaves of ``result``, and the format to rebuild it from them.

    Inside objects that pytree does not flatten, the leaves are tensors and everything that ``is_leaf``
    accepts. Raises ``Untraceable`` for an object that cannot be pickled.
    """
    # Pytree would rebuild a torch.Size as a tuple.
    paths, spec = leaves_with_paths(result, is_leaf=lambda x: isinstance(x, torch.Size))
    found = [leaf for _, leaf in paths]
    names: list[str] = []
    only_objects = not any(isinstance(x, Tensor) and x.is_floating_point() for x in found)
    leaves: list[Any] = []
    objects: list[PackedObject | None] = []
    for path, leaf in paths:
        name = readable(path)
        if isinstance(leaf, (Tensor, torch.device, ModelPart, *PLAIN)):
            leaves.append(leaf)
            objects.append(None)
            names.append(name)
            continue
        pickler = _Pickler(is_leaf)
        try:
            pickler.dump(leaf)
        except Exception as error:
            raise Untraceable(
                f"it returns an object of type {type(leaf).__qualname__} that cannot be pickled "
                f"({error})"
            ) from error
        objects.append(
            PackedObject(
                data=pickler.file.getvalue(),
                leaves=len(pickler.leaves),
                seen_by_loss=only_objects or is_dataclass(leaf),
                classes=tuple(pickler.classes),
            )
        )
        leaves += pickler.leaves
        names += [f"{name}.{i}".lstrip(".") for i in range(len(pickler.leaves))]
    return leaves, ResultFormat(spec=spec, objects=tuple(objects), names=tuple(names))


def note_parts(
    form: ResultFormat, value: Any, part_of: Callable[[Any], ModelPart | None]
) -> ResultFormat:
    """``form`` of ``value``, with the objects in it that were there before forward ran, by ``part_of``."""
    held, outer = tree_flatten(value, is_leaf=lambda x: part_of(x) is not None)
    parts = tuple(map(part_of, held))
    return replace(form, parts=parts, outer=outer) if any(parts) else form


def is_fixed(leaf: Any) -> bool:
    """Is ``leaf`` of a result, which is neither a tensor nor a number, the same in every run of a program?"""
    return not isinstance(leaf, (Tensor, int, float))


def is_alike(
    found: tuple[list[Any], ResultFormat], expected: tuple[list[Any], ResultFormat]
) -> bool:
    """Do two results have the same containers and objects, and the same values of what is fixed?"""
    if (found[1].spec, found[1].objects) != (expected[1].spec, expected[1].objects):
        return False
    pairs = zip(found[0], expected[0], strict=True)
    return all(bool(now == before) for now, before in pairs if is_fixed(before))


def result_of_values(model: str, reason: str = "") -> CaptureError:
    """The error for a result whose containers or objects depend on values of tensors."""
    return CaptureError(
        model,
        "its forward cannot be captured"
        + (f" ({reason})" if reason else "")
        + ", and what it returns depends on values of tensors in more than its tensors and numbers",
        "return tensors or numbers: no numpy arrays, strings or objects that are made from values, and the "
        "same containers in every call",
    )


def readable(path: Sequence[Any]) -> str:
    """A key path of pytree such as ``['batch'][0]`` as ``batch.0``."""
    return ".".join(re.sub(r"^[\[.]'?|'?\]$", "", str(key)) for key in path)


def result_tensors(result: Any) -> list[Tensor]:
    """The tensors in a model's result that a loss is assumed to read, in order."""
    if isinstance(result, Tensor):
        return [result]
    leaves, form = flatten_result(result)
    return [leaf for leaf in form.visible(leaves) if isinstance(leaf, Tensor)]


class _Pickler(pickle.Pickler):
    def __init__(self, is_leaf: Callable[[Any], bool]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.is_leaf = is_leaf
        self.leaves: list[Any] = []
        self.classes: list[type] = []
        self._number: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | str | tuple[str, int] | None:
        if isinstance(value, type) and "<locals>" in value.__qualname__:
            if value not in self.classes:
                self.classes.append(value)
            return "class", self.classes.index(value)
        if isinstance(value, Tensor) or self.is_leaf(value):
            if id(value) not in self._number:
                self._number[id(value)] = len(self.leaves)
                self.leaves.append(value)
            return self._number[id(value)]
        return "device" if isinstance(value, torch.device) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: PackedObject, leaves: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(packed.data))
        self.leaves = leaves
        self.classes = packed.classes

    def persistent_load(self, number: Any) -> Any:
        if isinstance(number, tuple):
            return self.classes[number[1]]
        if number == "device":  # the device of the object's tensors
            tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
            return tensors[0].device if tensors else torch.device("cpu")
        return self.leaves[number]
