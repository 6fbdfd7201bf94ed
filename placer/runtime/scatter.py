"""Cutting a batch into replicas and micro-batches, and joining what comes out.

Sizes are those of ``torch.chunk``, as ``nn.DataParallel`` has them: 30 rows over 8 replicas are
4 x 7 + 2, 10 rows over 8 are 2 x 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from placer.capture import TENSOR, CallFormat
from placer.errors import CaptureError


def chunk_sizes(total: int, chunks: int) -> tuple[int, ...]:
    """The sizes ``torch.chunk`` gives; at most ``chunks`` of them, none zero unless ``total`` is.

    >>> chunk_sizes(30, 8), chunk_sizes(10, 8), chunk_sizes(10, 3)
    ((4, 4, 4, 4, 4, 4, 4, 2), (2, 2, 2, 2, 2), (4, 4, 2))
    """
    if total == 0:
        return (0,)
    size = -(-total // chunks)
    return tuple(min(size, total - start) for start in range(0, total, size))


def batch_cuts(total: int, replicas: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batch sizes of every replica that gets rows.

    >>> batch_cuts(10, 2, 2), batch_cuts(1, 2, 4)
    (((3, 2), (3, 2)), ((1,),))
    """
    return tuple(chunk_sizes(size, microbatches) for size in chunk_sizes(total, replicas))


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


def split_target(target: Any, total: int | None, sizes: Sequence[int | None]) -> list[Any]:
    """``target`` (any pytree) cut into ``sizes`` rows; tensors without ``total`` rows go to all, whole."""
    leaves, spec = tree_flatten(target)

    def cut(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and total and leaf.size(0) == total:
            return list(leaf.split([size or 0 for size in sizes]))
        return (leaf,) * len(sizes)

    columns = [cut(leaf) for leaf in leaves]
    return [tree_unflatten([column[i] for column in columns], spec) for i in range(len(sizes))]


def join_rows(pieces: Sequence[Sequence[Any]]) -> list[Any]:
    """The result leaves of the whole batch from those of its pieces.

    Tensors are concatenated along dim 0, scalar tensors stacked into a vector (as
    ``nn.DataParallel`` gathers them), anything else is taken from the first piece.
    """
    if len(pieces) == 1:
        return list(pieces[0])
    return [_join(column) for column in zip(*pieces, strict=True)]


def _join(column: tuple[Any, ...]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return column[0]
    return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
