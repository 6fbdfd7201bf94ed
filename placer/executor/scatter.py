"""Splits a batch into slices, one per micro-batch of every replica, and joins their results.

Sizes are those of ``torch.chunk``, as in ``nn.DataParallel`` (`placer.schedule.split_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_unflatten

from placer.emit import StagedModel
from placer.errors import CaptureError, PlacerError
from placer.operands import leaves_with_paths, tensors_of_tree
from placer.program import Batched, CallFormat, Rows, is_mark, marked_dims, rows_of
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
    call: CallFormat,
    leaves: Sequence[torch.Tensor],
    *,
    replicas: int,
    microbatches: int,
    only_first: bool = False,
) -> ScatteredBatch:
    """Split the batch of these inputs; a call without a batch is one slice, on the first replica.

    With ``only_first``, for a dry run, a slice of a further replica is one of the first with as many rows.
    """
    one_slice = replicas == microbatches == 1
    total = (
        rows_of(call.batch_dims, [x.shape for x in leaves])
        if one_slice
        else batch_size(call, leaves)
    )
    if total is None:
        return ScatteredBatch(total=None, rows=((1,),), slices=[list(leaves)])
    rows = split_batch(total, replicas, microbatches)
    sizes = [size for row in rows for size in row]
    made = [*rows[0], *sorted(set(sizes) - set(rows[0]))] if only_first else sizes
    left = total - sum(made)
    slices = split_rows(call, leaves, [*made, left] if left else made)[: len(made)]
    if only_first:
        alike = dict(zip(made, slices, strict=True))
        slices = [*slices[: len(rows[0])], *(alike[size] for size in sizes[len(rows[0]) :])]
    return ScatteredBatch(total=total, rows=rows, slices=slices)


def check_target(target: Any, total: int | None) -> None:
    """Raise ``PlacerError`` if a tensor of ``target`` does not have the batch's ``total`` rows."""
    paths = leaves_with_paths(target, is_leaf=is_mark)[0] if total is not None else []
    for path, leaf in paths:
        rows = _rows_of_target(leaf)
        if rows is None or rows == total:
            continue
        found = f"has {rows} rows, the batch has {total}"
        remedy = (
            "give it one row per row of the batch, or wrap it as placer.Whole(tensor) if every slice "
            "needs all of it, such as class weights"
        )
        if total and rows % total == 0 and not is_mark(leaf):
            rows //= total
            remedy = (
                f"if each row of the batch has {rows} rows of the target, pass target.unflatten(0, "
                f"({total}, {rows})) and flatten it in loss_fn; or {remedy}"
            )
        raise PlacerError(f"target{keystr(path)}", found, remedy)


def _rows_of_target(leaf: Any) -> int | None:
    """The number of rows of a leaf of a target; None if it is not split."""
    if isinstance(leaf, Batched):
        dims = marked_dims(leaf)
        return next((leaf.value.size(dim) for dim in dims.values() if dim is not None), None)
    return leaf.size(0) if isinstance(leaf, torch.Tensor) and leaf.dim() else None


def split_target(target: Any, total: int | None, sizes: Sequence[int | None]) -> list[Any]:
    """``target`` (any pytree) split into parts with ``sizes`` rows.

    Every part gets the whole of a number, a scalar tensor and a ``Whole``. Raises ``PlacerError`` if a
    tensor does not have ``total`` rows, and for a numpy array that would have to be split.
    """
    check_target(target, total)
    if list(sizes) != [total]:
        _refuse_arrays(target)
    leaves, spec = tree_flatten(target, is_leaf=is_mark)

    def cut(leaf: Any) -> Sequence[Any]:
        value = leaf.value if is_mark(leaf) else leaf
        if _rows_of_target(leaf) is None or total is None:
            return (value,) * len(sizes)
        dim = leaf.dim if isinstance(leaf, Batched) else 0
        return list(value.split([size or 0 for size in sizes], dim))

    columns = [cut(leaf) for leaf in leaves]
    return [tree_unflatten([column[i] for column in columns], spec) for i in range(len(sizes))]


def join_target(target: Any, shares: Sequence[Sequence[Any]]) -> Any:
    """``target`` of the whole batch, without marks; ``shares`` has its leaves for each replica's rows."""
    leaves, spec = tree_flatten(target, is_leaf=is_mark)
    joined = [
        share[0]
        if _rows_of_target(leaf) is None
        else torch.cat(share, leaf.dim if isinstance(leaf, Batched) else 0)
        for leaf, share in zip(leaves, zip(*shares, strict=True), strict=True)
    ]
    return tree_unflatten(joined, spec)


def _refuse_arrays(target: Any) -> None:
    """Raise ``PlacerError`` if ``target`` has numpy arrays, which would not be split."""
    for path, leaf in leaves_with_paths(target, is_leaf=is_mark)[0]:
        if type(leaf).__module__ == "numpy" and leaf.ndim:
            raise PlacerError(
                f"target{keystr(path)}",
                "is a numpy array, which is not split with the batch",
                "pass a tensor: torch.from_numpy(array)",
            )


def check_results(staged: StagedModel) -> None:
    """Raise ``PlacerError`` if it is not known how a result of the batch follows from those of its slices."""
    for name, rows in zip(staged.call.result.names, staged.rows, strict=False):
        if not rows.is_known:
            made = (
                "is made from the numbers of the rows" if rows.numbered else "has no row per sample"
            )
            raise PlacerError(
                _named(staged, name),
                f"{made}, and it is not known how that of the batch follows from those of its slices",
                "use 1 replica and 1 micro-batch; or placed.step(…), whose loss_fn gets those of each slice; "
                f'or say it in the spec: "stored": {{"{f"result.{name}".rstrip(".")}": "mean"}}, "sum" or '
                '"concatenate"',
            )


def _named(staged: StagedModel, name: str) -> str:
    """A leaf of the result, with the method that returns it, unless it is ``forward``."""
    of = "" if staged.call.method == "forward" else f" of {staged.call.method}"
    return f"result{of} {name}".rstrip()


def join_results(
    staged: StagedModel, slices: Sequence[Sequence[Any]], sizes: Sequence[int]
) -> list[Any]:
    """The leaves of the result for the whole batch, from those of its slices.

    Results with a row per sample are concatenated along their rows, and others are combined as is known of
    them (`placer.program.rows`). ``sizes`` are the numbers of rows of the slices. Raises ``PlacerError`` if
    slices have results of different sizes.
    """
    if len(slices) == 1:
        return list(slices[0])
    names = [_named(staged, name) for name in staged.call.result.names]
    names += [name for each in staged.stored for name in each.leaf_names]
    columns = zip(names, zip(*slices, strict=True), staged.rows, strict=True)
    joined = []
    for name, column, rows in columns:  # forward may have enabled gradients
        grad = torch.is_grad_enabled() or any(
            tensor.requires_grad for tensor in tensors_of_tree(column)
        )
        with torch.set_grad_enabled(grad):
            joined.append(_join(name, column, rows, sizes))
    return joined


def _join(name: str, column: tuple[Any, ...], rows: Rows, sizes: Sequence[int]) -> Any:
    if rows.dim is not None:
        shapes = {value.shape[: rows.dim] + value.shape[rows.dim + 1 :] for value in column}
        if len(shapes) > 1 or (1 in sizes and any(value.dim() != rows.rank for value in column)):
            found = ", ".join("x".join(map(str, value.shape)) or "()" for value in column)
            raise PlacerError(
                name,
                f"slices of the batch have results of sizes that cannot be put together: {found}",
                "let forward return the same size for every slice (total_length= of pad_packed_sequence; "
                "squeeze(1), as squeeze() drops a single row), or use 1 replica and 1 micro-batch",
            )
        blocks = zip(*(value.chunk(rows.blocks, rows.dim) for value in column), strict=True)
        return torch.cat([part for block in blocks for part in block], rows.dim)
    if rows.combination == "concatenate":
        return torch.cat(column) if column[0].dim() else torch.stack(column)
    if rows.combination == "sum":
        return sum(column[1:], column[0])
    if rows.combination == "mean":
        shares = [size / sum(sizes) for size in sizes]
        first, *others = (value * share for value, share in zip(column, shares, strict=True))
        return sum(others, first)
    if isinstance(column[0], int | float) and any(value != column[0] for value in column):
        raise PlacerError(
            name,
            f"is another number for every slice of the batch: {', '.join(map(str, column))}",
            "use 1 replica and 1 micro-batch, or return it as a tensor with a row per sample",
        )
    return column[0]
