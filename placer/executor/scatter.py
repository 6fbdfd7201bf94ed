"""Splits a batch into slices, one per micro-batch of every replica, and joins their results.

Sizes are those of ``torch.chunk``, as in ``nn.DataParallel`` (`placer.schedule.split_batch`).
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
from placer.program import CallFormat, rows_of, unflatten_output
from placer.schedule import split_batch


def batch_size(call: CallFormat, leaves: Sequence[torch.Tensor]) -> int | None:
    """The number of rows of the inputs that have a row per sample; None if there are none.

    Raises ``CaptureError`` if they have different numbers of rows.
    """
    sizes = {
        each.name: leaf.size(each.batch_dim)
        for each, leaf in zip(call.inputs, leaves, strict=True)
        if each.batch_dim is not None
    }
    if len(set(sizes.values())) > 1:
        raise CaptureError(
            "inputs",
            f"the batch differs between inputs: {', '.join(f'{n}: {s}' for n, s in sizes.items())}",
            "give all of them as many rows; an input that is not split with the batch is "
            '"whole" in the spec\'s "inputs"',
        )
    return next(iter(sizes.values()), None)


def split_rows(
    call: CallFormat, leaves: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[list[torch.Tensor]]:
    """One list of inputs per size: that many rows of the batched inputs, and the others unsplit."""
    if len(sizes) == 1:
        return [list(leaves)]
    columns = [
        (leaf,) * len(sizes) if dim is None else leaf.split(list(sizes), dim)
        for leaf, dim in zip(leaves, call.batch_dims, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatteredBatch:
    """A batch split into slices, one per micro-batch of every replica.

    ``rows[replica][microbatch]`` is the number of rows; ``slices`` has the inputs of each slice in that
    order. ``total`` is the number of all rows; None for a call without a batch.
    """

    total: int | None
    rows: tuple[tuple[int, ...], ...]
    slices: Sequence[list[torch.Tensor]]

    @property
    def sizes(self) -> list[int]:
        """The number of rows of every slice, in the order of ``slices``."""
        return [size for row in self.rows for size in row]

    @property
    def largest(self) -> int:
        """The index of the first slice with the most rows."""
        return self.sizes.index(max(self.sizes))

    def of_replica(self, index: int) -> range:
        """The indices of a replica's slices; empty if it gets no rows."""
        start = sum(len(row) for row in self.rows[:index])
        return range(start, start + (len(self.rows[index]) if index < len(self.rows) else 0))


def scatter_batch(
    call: CallFormat, leaves: Sequence[torch.Tensor], *, replicas: int, microbatches: int
) -> ScatteredBatch:
    """Split the batch of these inputs; a call without a batch is one slice, on the first replica."""
    one_slice = replicas == microbatches == 1
    total = (
        rows_of(call.batch_dims, [x.shape for x in leaves])
        if one_slice
        else batch_size(call, leaves)
    )
    if total is None:
        return ScatteredBatch(total=None, rows=((1,),), slices=[list(leaves)])
    rows = split_batch(total, replicas, microbatches)
    slices = split_rows(call, leaves, [size for row in rows for size in row])
    return ScatteredBatch(total=total, rows=rows, slices=slices)


@dataclass(frozen=True, slots=True)
class Whole:
    """Marks a part of ``target`` that is not split: ``loss_fn`` gets ``value`` as it is for every slice.

    For example ``target=(labels, placer.Whole(class_weights))``.
    """

    value: Any


def unwrap_target(target: Any) -> Any:
    """``target`` with every ``Whole`` replaced by its value, as ``loss_fn`` gets it."""
    return tree_map(
        lambda leaf: leaf.value if isinstance(leaf, Whole) else leaf, target, is_leaf=_is_whole
    )


def check_target(target: Any, total: int | None) -> None:
    """Raise ``PlacerError`` if a tensor of ``target`` does not have the batch's ``total`` rows."""
    paths = tree_flatten_with_path(target, is_leaf=_is_whole)[0] if total is not None else []
    for path, leaf in paths:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.size(0) == total:
            continue
        found = f"has {leaf.size(0)} rows, the batch has {total}"
        remedy = (
            "give it one row per row of the batch, or wrap it as placer.Whole(tensor) if every slice "
            "needs all of it, such as class weights"
        )
        if total and leaf.size(0) % total == 0:
            rows = leaf.size(0) // total
            remedy = (
                f"if each row of the batch has {rows} rows of the target, pass target.unflatten(0, "
                f"({total}, {rows})) and flatten it in loss_fn; or {remedy}"
            )
        raise PlacerError(f"target{keystr(path)}", found, remedy)


def split_target(target: Any, total: int | None, sizes: Sequence[int | None]) -> list[Any]:
    """``target`` (any pytree) split into parts with ``sizes`` rows.

    Every part gets the whole of a number, a scalar tensor and a ``Whole``. Raises ``PlacerError`` if a
    tensor does not have ``total`` rows, and for a numpy array that would have to be split.
    """
    check_target(target, total)
    if list(sizes) != [total]:
        _refuse_arrays(target)
    leaves, spec = tree_flatten(target, is_leaf=_is_whole)

    def cut(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and total is not None:
            return list(leaf.split([size or 0 for size in sizes]))
        return (leaf.value if isinstance(leaf, Whole) else leaf,) * len(sizes)

    columns = [cut(leaf) for leaf in leaves]
    return [tree_unflatten([column[i] for column in columns], spec) for i in range(len(sizes))]


def _refuse_arrays(target: Any) -> None:
    """Raise ``PlacerError`` if ``target`` has numpy arrays, which would not be split."""
    for path, leaf in tree_flatten_with_path(target, is_leaf=_is_whole)[0]:
        if type(leaf).__module__ == "numpy" and leaf.ndim:
            raise PlacerError(
                f"target{keystr(path)}",
                "is a numpy array, which is not split with the batch",
                "pass a tensor: torch.from_numpy(array)",
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Whole)


def join_results(staged: StagedModel, slices: Sequence[Sequence[Any]]) -> Any:
    """What ``forward`` returns for the whole batch, from the result leaves of its slices.

    Tensors are concatenated along dim 0, and scalar tensors are stacked into a vector, as
    ``nn.DataParallel`` does. A leaf that is not a tensor, or does not depend on the batch, is taken from
    the first slice.
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
