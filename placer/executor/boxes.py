"""Inputs of which this process has its own part in space only: `placer.Box`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_any, tree_map

from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.program import Box
from placer.space import Layout

Slices = tuple[slice, ...]
_FULL = slice(None)
_REMEDY = "pass whole[placed.boxes[name]] for the sizes of compile; or pass the whole tensor"


def own_boxes(staged: StagedModel, shard: int | None) -> dict[str, Slices]:
    """By the name of an input, a slice per dimension: what ``shard`` needs of it; all of it, if None."""
    return {
        each.name: tuple(
            _FULL
            if shard is None or not isinstance(layout, Layout) or dim not in layout.dims
            else slice(*layout.boxes[shard][dim])
            for dim in range(len(each.shape))
        )
        for name, each in zip(staged.graph_inputs, staged.call.inputs, strict=False)
        for layout in (staged.layouts.get(name),)
    }


def with_stand_ins(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], dict[int, torch.Tensor]]:
    """The arguments with a tensor of the whole shape, but without its memory, in place of each `Box`.

    Also returned: the id of each of these -> the part that was given.
    """
    boxes: dict[int, torch.Tensor] = {}

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, Box):
            return leaf
        if not isinstance(leaf.value, torch.Tensor):
            raise PlacerError("placer.Box", "has no tensor", "pass a tensor and the whole shape")
        if leaf.value.shape == torch.Size(leaf.shape):
            return leaf.value
        whole = leaf.value.new_zeros(()).expand(leaf.shape)
        whole.requires_grad_(leaf.value.requires_grad)
        boxes[id(whole)] = leaf.value
        return whole

    if tree_any(_is_box, (args, kwargs), is_leaf=_is_box):
        args, kwargs = tree_map(stand_in, (args, kwargs), is_leaf=_is_box)
    return args, kwargs, boxes


def refuse_boxes(*values: Any, why: str) -> None:
    """Raise ``PlacerError`` if there is a `Box` in ``values``, with the reason ``why`` it cannot be there."""
    if tree_any(_is_box, values, is_leaf=_is_box):
        raise PlacerError("placer.Box", why, "pass the whole tensor")


def check_boxes(
    staged: StagedModel,
    leaves: Sequence[torch.Tensor],
    boxes: Mapping[int, torch.Tensor],
    *,
    shard: int,
) -> None:
    """Raise ``PlacerError`` if a box, by the position of its leaf, is not the part that ``shard`` needs."""
    for position, box in boxes.items():
        where = f"input {staged.call.inputs[position].name}"
        layout = staged.layouts.get(staged.graph_inputs[position])
        shape = leaves[position].shape
        if not isinstance(layout, Layout):
            why = f"{layout} reads it whole" if layout else "it is not cut"
            raise PlacerError(where, f"is a placer.Box, but {why}", "pass the whole tensor")
        own = layout.boxes[shard]
        if box.shape != (expected := layout.shape_of(own, shape)):
            spans = ", ".join(
                f"{own[d][0]}:{own[d][1]}" if d in layout.dims else ":" for d in range(len(own))
            )
            raise PlacerError(
                where,
                f"is a placer.Box of shape {list(box.shape)}, but shard {shard} needs [{spans}] of "
                f"{list(shape)}, which has the shape {list(expected)}",
                _REMEDY,
            )


def _is_box(value: Any) -> bool:
    return isinstance(value, Box)
