"""Marks around arguments and targets, which say how they are split with the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from placer.errors import CaptureError
from placer.operands import leaves_with_paths
from placer.program.result import readable
from placer.program.rows.batch import BatchDim


@dataclass(frozen=True, slots=True)
class Whole:
    """Marks a part of an argument or target that is not split: every slice of the batch gets all of it.

    For example ``placed(x, placer.Whole(prior))`` or ``target=(labels, placer.Whole(class_weights))``.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Batched:
    """Marks a tensor of an argument or target that has a row per sample along dimension ``dim``.

    For example ``placed(x, placer.Batched(state, dim=1))``.
    """

    value: Any
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Box:
    """Marks the part, this process's own, of an input whose whole has the given ``shape``.

    For stages that are split in space, with a process per device: ``placed.boxes`` says which part that is.
    For example ``placed.step(placer.Box(x[placed.boxes["x"]], x.shape), …)``, without ever making all of x.
    """

    value: Tensor
    shape: Sequence[int]


def is_mark(value: Any) -> bool:
    """Is ``value`` a `Whole` or a `Batched`?"""
    return isinstance(value, Whole | Batched)


def unmarked(value: Any) -> Any:
    """``value`` (any pytree) with what is marked in place of every mark."""
    return tree_map(lambda x: x.value if is_mark(x) else x, value, is_leaf=is_mark)


def marked_dims(value: Any) -> dict[str, BatchDim]:
    """The dimension of the batch of every marked tensor in ``value`` (any pytree), by its path as a name.

    Raises ``CaptureError`` for a dimension that a tensor lacks.
    """
    found: dict[str, BatchDim] = {}
    for path, mark in leaves_with_paths(value, is_leaf=is_mark)[0]:
        if not is_mark(mark):
            continue
        for inner, leaf in leaves_with_paths(mark.value)[0]:
            if not isinstance(leaf, Tensor):
                continue
            name = readable((*path, *inner))
            dim = mark.dim if isinstance(mark, Batched) else None
            if dim is not None and not -leaf.dim() <= dim < leaf.dim():
                raise CaptureError(
                    name,
                    f"is placer.Batched(…, dim={dim}), but has {leaf.dim()} dimensions",
                    f"its shape is {list(leaf.shape)}",
                )
            found[name] = None if dim is None else dim % leaf.dim()
    return found
