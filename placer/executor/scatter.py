"""Cutting a batch into replicas and micro-batches, and joining what comes out.

Sizes are those of ``torch.chunk``, as ``nn.DataParallel`` has them (`placer.schedule.split_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

from placer.emit import StagedModel
from placer.errors import CaptureError, PlacerError
from placer.program import TENSOR, CallFormat, unflatten_output
from placer.schedule import split_batch


def batch_size(call: CallFormat, leaves: Sequence[torch.Tensor]) -> int | None:
    """Rows of this call's batch (size of dim 0 of the batched inputs); None without such inputs.

    Raises ``CaptureError`` when the batched inputs disagree.
    """
    tensor_names = [n for n, c in zip(call.leaf_names, call.constants, strict=True) if c is TENSOR]
    names = [n for n, mark in zip(tensor_names, call.batched, strict=True) if mark]
    sizes = [t.size(0) for t, mark in zip(leaves, call.batched, strict=True) if mark]
    if len(set(sizes)) > 1:
        found = ", ".join(f"{n}: {s}" for n, s in zip(names, sizes, strict=True))
        raise CaptureError(
            "inputs",
            f"the batch (dim 0) differs between inputs: {found}",
            "give all of them the same",
        )
    return sizes[0] if sizes else None


def split_rows(
    call: CallFormat, leaves: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[list[torch.Tensor]]:
    """One list of inputs per size: rows of the batched inputs, the others whole."""
    if len(sizes) == 1 and (not leaves or batch_size(call, leaves) in (None, sizes[0])):
        return [list(leaves)]
    columns = [
        leaf.split(list(sizes)) if batched else (leaf,) * len(sizes)
        for leaf, batched in zip(leaves, call.batched, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBatch:
    """The micro-batches of a batch: rows per replica and micro-batch, and the inputs of each in order.

    ``total`` are all its rows; None for a call without a batch.
    """

    total: int | None
    rows: tuple[tuple[int, ...], ...]
    slices: Sequence[list[torch.Tensor]]

    @property
    def sizes(self) -> list[int]:
        """Rows of every micro-batch, in the order of ``slices``."""
        return [size for row in self.rows for size in row]

    @property
    def largest(self) -> int:
        """The micro-batch with the most rows, the first of them."""
        return self.sizes.index(max(self.sizes))

    def of_replica(self, index: int) -> range:
        """The micro-batches of a replica; none where there are no rows for it."""
        start = sum(len(row) for row in self.rows[:index])
        return range(start, start + (len(self.rows[index]) if index < len(self.rows) else 0))


def cut_batch(
    call: CallFormat, leaves: Sequence[torch.Tensor], *, replicas: int, microbatches: int
) -> CutBatch:
    """The batch of these inputs, cut; a call without a batch is one slice, of the first replica."""
    total = batch_size(call, leaves)
    if total is None:
        return CutBatch(total=None, rows=((1,),), slices=[list(leaves)])
    rows = split_batch(total, replicas, microbatches)
    slices = split_rows(call, leaves, [size for row in rows for size in row])
    return CutBatch(total=total, rows=rows, slices=slices)


@dataclass(frozen=True, slots=True)
class Whole:
    """Part of a ``target`` that has no rows of the batch: ``loss_fn`` gets ``value`` for every slice.

    For example ``target=(labels, placer.Whole(class_weights))``.
    """

    value: Any


def unwrap_target(target: Any) -> Any:
    """``target`` as ``loss_fn`` gets it for the whole batch."""
    return tree_map(
        lambda leaf: leaf.value if isinstance(leaf, Whole) else leaf, target, is_leaf=_is_whole
    )


def check_target(target: Any, total: int | None) -> None:
    """Raise ``PlacerError`` when a tensor of ``target`` has not the batch's ``total`` rows."""
    paths = tree_flatten_with_path(target, is_leaf=_is_whole)[0] if total is not None else []
    for path, leaf in paths:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.size(0) == total:
            continue
        found = f"has {leaf.size(0)} rows, the batch has {total}"
        remedy = (
            "give it one row per row of the batch, or placer.Whole(tensor) for what every slice of the "
            "batch is to get whole, such as class weights"
        )
        if total and leaf.size(0) % total == 0:
            rows = leaf.size(0) // total
            remedy = (
                f"if each row of the batch has {rows} of them, give target.unflatten(0, ({total}, {rows})) "
                f"and flatten it in loss_fn; or {remedy}"
            )
        raise PlacerError(f"target{keystr(path)}", found, remedy)


def split_target(target: Any, total: int | None, sizes: Sequence[int | None]) -> list[Any]:
    """``target`` (any pytree) cut into ``sizes`` rows; numbers, and what is ``Whole``, go to all.

    Raises ``PlacerError`` when a tensor has another number of rows than ``total``.
    """
    check_target(target, total)
    leaves, spec = tree_flatten(target, is_leaf=_is_whole)

    def cut(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and total is not None:
            return list(leaf.split([size or 0 for size in sizes]))
        return (leaf.value if isinstance(leaf, Whole) else leaf,) * len(sizes)

    columns = [cut(leaf) for leaf in leaves]
    return [tree_unflatten([column[i] for column in columns], spec) for i in range(len(sizes))]


def _is_whole(value: Any) -> bool:
    return isinstance(value, Whole)


def join_results(staged: StagedModel, slices: Sequence[Sequence[Any]]) -> Any:
    """What ``forward`` returns for the whole batch, from the result leaves of its slices.

    Tensors are concatenated along dim 0, scalar tensors stacked into a vector (as
    ``nn.DataParallel`` gathers them); what is no tensor, or does not depend on the batch, is taken
    from the first slice.
    """
    leaves = list(slices[0])
    if len(slices) > 1:
        columns = zip(*slices, strict=True)
        cut = staged.batched_results
        leaves = [_join(c) if b else c[0] for c, b in zip(columns, cut, strict=True)]
    return unflatten_output(staged.call, leaves)


def _join(column: tuple[Any, ...]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return column[0]
    return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
