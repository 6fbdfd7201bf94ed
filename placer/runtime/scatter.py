"""Cutting a batch into replicas and micro-batches, and joining what comes out.

Sizes are those of ``torch.chunk``, as ``nn.DataParallel`` has them (`placer.schedule.batch_cuts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from placer.capture import TENSOR, CallFormat, unflatten_output
from placer.emit import StagedModel
from placer.errors import CaptureError


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


def join_results(staged: StagedModel, pieces: Sequence[Sequence[Any]]) -> Any:
    """What ``forward`` returns for the whole batch, from the result leaves of its pieces.

    Tensors are concatenated along dim 0, scalar tensors stacked into a vector (as
    ``nn.DataParallel`` gathers them); what is no tensor, or does not depend on the batch, is taken
    from the first piece.
    """
    leaves = list(pieces[0])
    if len(pieces) > 1:
        columns = zip(*pieces, strict=True)
        cut = staged.batched_results
        leaves = [_join(c) if b else c[0] for c, b in zip(columns, cut, strict=True)]
    return unflatten_output(staged.call, leaves)


def _join(column: tuple[Any, ...]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return column[0]
    return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
