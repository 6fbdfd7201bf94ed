"""Tries a loss function on a few rows, to find whether it is a mean or a sum over the rows of a batch.

The function is called for two groups of rows, first for each alone and then for both together. The
three losses show whether it is a mean over rows, a sum, or neither. Rows of outputs are the model's own,
half of them averaged with uniform random numbers (so values in [0, 1], and positive values, stay such).
Rows of targets are the caller's, and then others with values that a loss may treat specially: one group
has only the least label and the other only the largest, or all labels in turn; and zeros and NaNs if the
caller's target has any. So a label that is ignored (``ignore_index``) or weighted is noticed however
rare it is in the batch.
"""

from __future__ import annotations

import functools
import math
import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from placer.executor.loss.call import bound_values, call_loss
from placer.executor.loss.reduction import COMBINATIONS, Combination, LossRule
from placer.executor.loss.values import Number
from placer.executor.scatter import unwrap_target
from placer.program.restore import Snapshot, module_roots
from placer.program.result import ResultFormat

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}  # relative; losses may compute in float32
_COARSE = 2e-2  # for 16-bit losses
_MAX_ELEMENTS = 2**22  # elements of a group's outputs, unless its least number of rows has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a batch to try a loss with: leaves of the model's result and the target, on one device.

    ``without_rows`` has the indices of those tensors in ``result`` whose dim 0 is not the batch.
    """

    result: Sequence[Any]
    format: ResultFormat
    rows: int
    without_rows: Sequence[int]
    target: Any
    total: int | None  # rows of the target; None if it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFill:
    """Values to put into one tensor of a group's target, in place of the caller's.

    These are ``values`` in turn, or if there are none, the caller's values times ``factor``.
    """

    leaf: int = -1  # the index of the tensor in the flattened target; -1: change nothing
    values: Sequence[Number] = ()
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The losses of two groups of rows, each alone and both together."""

    first: float
    second: float
    together: float
    share: float  # the first group's weight in a mean: its share of the rows, or of the count
    tolerance: float  # relative
    tried: str  # describes the groups in an error message

    @property
    def fitting(self) -> frozenset[Combination]:
        """The combinations that explain the losses; both of them if the losses are all zero or NaN."""
        if math.isnan(self.together):
            unknown = math.isnan(self.first) or math.isnan(self.second)
            return COMBINATIONS if unknown else frozenset()
        scale = max(abs(self.first), abs(self.second), abs(self.together))
        expected = {"mean": self.mean, "sum": self.sum}
        return frozenset(
            kind
            for kind in COMBINATIONS
            if self.together == expected[kind]
            or abs(self.together - expected[kind]) <= self.tolerance * scale
        )

    @property
    def mean(self) -> float:
        """What ``together`` is if the loss is a mean."""
        return self.share * self.first + (1 - self.share) * self.second

    @property
    def sum(self) -> float:
        """What ``together`` is if the loss is a sum."""
        return self.first + self.second


def try_rows(
    loss_fn: Callable[..., Tensor],
    rows: Rows,
    first: TargetFill,
    second: TargetFill,
    tried: str,
    rule: LossRule | None = None,
) -> list[Trial]:
    """Try ``loss_fn`` on two groups of rows, with ``first`` and ``second`` put into their targets.

    If ``first`` has more values than fit into a group, there are several trials. A mean is over rows, or
    over what the normalizer of ``rule`` counts.

    Raises what ``loss_fn`` raises. Random states are restored afterwards, and so are modules, objects,
    lists, dicts and sets that ``loss_fn`` holds or closes over.
    """
    least = _min_rows(rows)
    width = _target_row_elements(rows, first.leaf)
    most = max(least, _MAX_ELEMENTS // max(1, _result_row_elements(rows)))
    size = min(most, max(least, -(-len(first.values) // width)))
    step = size * width
    chunks = [first.values[i : i + step] for i in range(0, len(first.values), step)] or [()]
    found = []
    with _side_effects_undone(loss_fn, rows):
        for values in chunks:
            target_fill = TargetFill(leaf=first.leaf, values=values, factor=first.factor)
            found.append(_compare(loss_fn, rows, (target_fill, second), (size, least), tried, rule))
    return found


def depends_on_tensors_without_rows(loss_fn: Callable[..., Tensor], rows: Rows) -> bool:
    """Whether the loss changes with tensors of the result that have no rows, such as a scalar."""
    count = _min_rows(rows)
    target = _target_rows(rows, 0, count, TargetFill())
    with _side_effects_undone(loss_fn, rows):
        losses = []
        for factor in (1.0, 0.5):
            leaves = _result_rows(rows, 0, count, own=count, half=True)
            for position in rows.without_rows:
                leaves[position] = leaves[position] * factor
            losses.append(_loss(loss_fn, rows, leaves, target))
    return not torch.equal(losses[0].nan_to_num(), losses[1].nan_to_num())


def _min_rows(rows: Rows) -> int:
    """The least number of rows in a group: 2, or 1 if the slice has no more or rows are very large."""
    return 1 if _result_row_elements(rows) > _MAX_ELEMENTS else min(rows.rows, 2)


def _compare(
    loss_fn: Callable[..., Tensor],
    rows: Rows,
    target_fills: tuple[TargetFill, TargetFill],
    sizes: tuple[int, int],
    tried: str,
    rule: LossRule | None,
) -> Trial:
    first, second = sizes
    targets = [
        _target_rows(rows, start, size, target_fill)
        for start, size, target_fill in zip((0, first), sizes, target_fills, strict=True)
    ]
    groups = [  # first row, number of rows, how many of them are unchanged rows of the model, target
        (0, first + second, first, _join_targets(rows, targets)),
        (0, first, first, targets[0]),
        (first, second, 0, targets[1]),
    ]
    share = first / (first + second)
    if rule is not None and rule.normalizer is not None:
        counted = rule.count([unwrap_target(target) for target in targets])
        share = counted[0] / sum(counted) if sum(counted) else 0.0
    failed: Exception | None = None
    for half in (False, True) if _has_half(rows) else (False,):
        try:
            losses = [
                _loss(loss_fn, rows, _result_rows(rows, start, count, own=own, half=half), target)
                for start, count, own, target in groups
            ]
        except Exception as error:  # it may require the output's own 16-bit dtype
            failed = failed or error
            continue
        tolerance = _COARSE if half else _TOLERANCE.get(losses[0].dtype, _COARSE)
        together, one, other = (float(loss) for loss in losses)
        return Trial(
            first=one,
            second=other,
            together=together,
            share=share,
            tolerance=tolerance,
            tried=tried,
        )
    assert failed is not None
    raise failed


def _loss(loss_fn: Callable[..., Tensor], rows: Rows, leaves: Sequence[Any], target: Any) -> Tensor:
    return call_loss(loss_fn, rows.format.unflatten(leaves), unwrap_target(target))


def _result_rows(rows: Rows, start: int, count: int, *, own: int, half: bool) -> list[Any]:
    """Copies of ``count`` rows of the result, from row ``start`` on.

    All but the first ``own`` of them are averaged with noise, which is the same in every call for the
    same number of rows. Without ``half``, 16-bit numbers are converted to float32.
    """
    found: list[Any] = []
    for position, leaf in enumerate(rows.result):
        if not isinstance(leaf, Tensor) or position in rows.without_rows:
            found.append(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
            continue
        each = per_row(leaf, rows.rows)
        given = _take(leaf.detach().unflatten(0, (-1, each)), start, count).flatten(0, 1)
        if given.is_floating_point():
            given = given if half or given.element_size() > 2 else given.float()
            if own < count:
                generator = torch.Generator(given.device).manual_seed(position)
                mixed = given[own * each :]
                noise = torch.rand(
                    mixed.shape, dtype=mixed.dtype, device=mixed.device, generator=generator
                )
                mixed.add_(noise).div_(2)
        found.append(given)
    return found


def _target_rows(rows: Rows, start: int, count: int, target_fill: TargetFill) -> Any:
    leaves, spec = tree_flatten(rows.target)
    for position, leaf in enumerate(leaves):
        if not _has_target_rows(rows, leaf):
            continue
        taken = _take(leaf.detach(), start, count)
        if position == target_fill.leaf and target_fill.values:
            values = torch.tensor(target_fill.values).to(taken.device, taken.dtype)
            index = torch.arange(taken.numel(), device=taken.device) % len(values)
            taken = values[index].view(taken.shape)
        elif position == target_fill.leaf and target_fill.factor != 1.0:
            taken = taken * target_fill.factor
        leaves[position] = taken
    return tree_unflatten(leaves, spec)


def _join_targets(rows: Rows, targets: Sequence[Any]) -> Any:
    leaves, spec = tree_flatten(rows.target)
    columns = zip(*(tree_flatten(target)[0] for target in targets), strict=True)
    joined = [
        torch.cat(column) if _has_target_rows(rows, leaf) else column[0]
        for leaf, column in zip(leaves, columns, strict=True)
    ]
    return tree_unflatten(joined, spec)


def _has_target_rows(rows: Rows, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.size(0) == rows.total


def per_row(leaf: Any, rows: int) -> int:
    """How many entries along dim 0 of ``leaf`` belong to each of ``rows`` rows; 0 if it has no rows."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or not rows or leaf.size(0) % rows:
        return 0
    return leaf.size(0) // rows


def _take(leaf: Tensor, start: int, count: int) -> Tensor:
    index = (torch.arange(count, device=leaf.device) + start) % leaf.size(0)
    return leaf.index_select(0, index)


def _has_half(rows: Rows) -> bool:
    return any(
        isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.element_size() <= 2
        for leaf in rows.result
    )


def _target_row_elements(rows: Rows, leaf: int) -> int:
    """Elements in a row of one tensor of the target, at least 1."""
    leaves = tree_flatten(rows.target)[0]
    return max(1, leaves[leaf][0].numel()) if leaf >= 0 else 1


def _result_row_elements(rows: Rows) -> int:
    """Elements in a row of the result, in all its tensors together."""
    cut = [leaf for i, leaf in enumerate(rows.result) if i not in rows.without_rows]
    return sum(leaf.numel() // rows.rows for leaf in cut if isinstance(leaf, Tensor))


@contextmanager
def _side_effects_undone(loss_fn: Callable[..., Tensor], rows: Rows) -> Iterator[None]:
    """Run the block without autograd and autocast; afterwards restore what ``loss_fn`` may change."""
    tensors = [leaf for leaf in rows.result if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    others = [device] if device.type not in ("cpu", "meta") else []
    kind = device.type if others else "cuda"
    held = list(_held_by(loss_fn))
    modules = list(dict.fromkeys(x for x in held if isinstance(x, nn.Module)))
    left_out = (nn.Module, types.ModuleType, types.FunctionType, type)
    attributes = [vars(x) for x in held if hasattr(x, "__dict__") and not isinstance(x, left_out)]
    inside = (x for attribute in attributes for x in attribute.values())
    containers = [(x, x.copy()) for x in (*held, *inside) if type(x) in (list, dict, set)]
    containers += [(x, dict(x)) for x in attributes if isinstance(x, dict)]
    snapshots = [Snapshot(module_roots(module)) for module in modules]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    python_state = random.getstate()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(others, device_type=kind))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        try:
            yield
        finally:
            random.setstate(python_state)
            for snapshot in snapshots:
                snapshot.restore()
            _put_back(containers)
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _held_by(loss_fn: Any, depth: int = 3) -> Iterator[Any]:
    """A loss function and the objects in its closure, defaults and bound arguments, and its ``self``."""
    yield loss_fn
    held: list[Any] = []
    if isinstance(loss_fn, functools.partial):
        held = [loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()]
    elif isinstance(loss_fn, types.MethodType):
        held = [loss_fn.__self__]
    elif isinstance(loss_fn, types.FunctionType):
        held = bound_values(loss_fn)
    for value in held if depth else ():
        yield from _held_by(value, depth - 1)


def _put_back(containers: Sequence[tuple[Any, Any]]) -> None:
    """Restore the contents of lists, dicts and sets."""
    for container, before in containers:
        if isinstance(container, list):
            container[:] = before
        else:
            container.clear()
            container.update(before)
