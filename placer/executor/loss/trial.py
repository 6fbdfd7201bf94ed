"""Finding out, by calling it on a few rows, how a loss function combines the rows of a batch.

Two groups of rows are given to the loss function, each by itself and then both together. For a mean
over rows and for a sum, the three losses fit in one way only. Rows of outputs are the model's own, half
of them mixed with uniform numbers (what lies in [0, 1], or is positive, stays so). Rows of targets are
the caller's own, and such as set apart what a loss may count differently: one group with the least
label only, the other with the largest, or with all labels in turn; zeros and NaNs where there are
any. A label that is not counted (``ignore_index``), or counted by a weight, shows there however rare
it is in the batch.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from placer.executor.loss.call import call_loss
from placer.executor.loss.reduction import Combination, LossRule
from placer.executor.loss.values import Number
from placer.executor.scatter import unwrap_target
from placer.program.restore import Snapshot
from placer.program.result import ResultFormat

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}  # relative; losses may compute in float32
_COARSE = 2e-2  # of 16-bit losses
_MOST_ELEMENTS = 2**22  # of a group's outputs, beyond the rows that it has at least
_ALL: frozenset[Combination] = frozenset(("mean", "sum"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a batch: the leaves of the model's result, and the target, on one device.

    ``rowless`` are the positions of tensors in the result that have no rows.
    """

    result: Sequence[Any]
    format: ResultFormat
    rows: int
    rowless: Sequence[int]
    target: Any
    total: int | None  # rows of the target; None where it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """What a group's rows of one target tensor hold instead of the caller's values.

    That is ``values`` in turn, or where there are none the caller's times ``factor``.
    """

    leaf: int = -1  # which tensor of the target; -1: none
    values: Sequence[Number] = ()
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Losses of two groups of rows, each by itself and together, and which combinations fit them."""

    first: float
    second: float
    together: float
    share: float  # of what a mean is over, in the first group: rows, or what is counted
    tolerance: float
    tried: str  # what was special about the groups, for an error

    @property
    def fitting(self) -> frozenset[Combination]:
        """Both fit where nothing can be told: all losses are zero, or NaN wherever it matters."""
        if self.together != self.together:
            alone = (self.first, self.second)
            return _ALL if any(loss != loss for loss in alone) else frozenset()
        scale = max(abs(self.first), abs(self.second), abs(self.together))
        expected = {"mean": self.mean, "sum": self.sum}
        return frozenset(
            kind
            for kind in _ALL
            if self.together == expected[kind]
            or abs(self.together - expected[kind]) <= self.tolerance * scale
        )

    @property
    def mean(self) -> float:
        return self.share * self.first + (1 - self.share) * self.second

    @property
    def sum(self) -> float:
        return self.first + self.second


def try_rows(
    loss_fn: Callable[..., Tensor],
    rows: Rows,
    first: Filling,
    second: Filling,
    tried: str,
    rule: LossRule | None = None,
) -> list[Trial]:
    """Two groups of rows whose targets are filled in these ways; one trial, or several for many values.

    Means are over rows, or over what the normalizer of ``rule`` counts.

    Raises what ``loss_fn`` raises. Random numbers are as before, and so is what it writes to modules and
    objects that it is or holds, and to lists, dicts and sets that these or its closure have.
    """
    widest = _widest(rows)
    least = _least(rows)
    width = _row_elements(rows, first.leaf)
    most = max(least, _MOST_ELEMENTS // max(1, widest))
    size = min(most, max(least, -(-len(first.values) // width)))
    step = size * width
    chunks = [first.values[i : i + step] for i in range(0, len(first.values), step)] or [()]
    found = []
    with _undisturbed(loss_fn, rows):
        for values in chunks:
            filling = Filling(leaf=first.leaf, values=values, factor=first.factor)
            found.append(_compare(loss_fn, rows, (filling, second), (size, least), tried, rule))
    return found


def depends_on_rowless(loss_fn: Callable[..., Tensor], rows: Rows) -> bool:
    """Does the loss read tensors of the result that have no rows, a scalar say?"""
    count = _least(rows)
    target = _target_rows(rows, 0, count, Filling())
    with _undisturbed(loss_fn, rows):
        losses = []
        for factor in (1.0, 0.5):
            leaves = _result_rows(rows, 0, count, own=count, half=True)
            for position in rows.rowless:
                leaves[position] = leaves[position] * factor
            losses.append(_loss(loss_fn, rows, leaves, target))
    return not torch.equal(losses[0].nan_to_num(), losses[1].nan_to_num())


def _least(rows: Rows) -> int:
    """Rows in a group at least: as few as in a slice, but one only where it must be."""
    return 1 if _widest(rows) > _MOST_ELEMENTS else min(rows.rows, 2)


def _compare(
    loss_fn: Callable[..., Tensor],
    rows: Rows,
    fillings: tuple[Filling, Filling],
    sizes: tuple[int, int],
    tried: str,
    rule: LossRule | None,
) -> Trial:
    first, second = sizes
    targets = [
        _target_rows(rows, start, size, filling)
        for start, size, filling in zip((0, first), sizes, fillings, strict=True)
    ]
    groups = [  # first row, number of rows, of which the model's own come first; target
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
        except Exception as error:  # it may want the data type that it is given
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
    """Copies of ``count`` rows from ``start`` on; after the first ``own`` ones mixed with noise.

    The noise is the same for as many rows. Without ``half``, 16-bit numbers become float32.
    """
    found: list[Any] = []
    for position, leaf in enumerate(rows.result):
        if not isinstance(leaf, Tensor) or position in rows.rowless:
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


def _target_rows(rows: Rows, start: int, count: int, filling: Filling) -> Any:
    leaves, spec = tree_flatten(rows.target)
    for position, leaf in enumerate(leaves):
        if not _has_target_rows(rows, leaf):
            continue
        taken = _take(leaf.detach(), start, count)
        if position == filling.leaf and filling.values:
            values = torch.tensor(filling.values).to(taken.device, taken.dtype)
            index = torch.arange(taken.numel(), device=taken.device) % len(values)
            taken = values[index].view(taken.shape)
        elif position == filling.leaf and filling.factor != 1.0:
            taken = taken * filling.factor
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
    """How many entries of ``leaf`` along dim 0 each of ``rows`` rows has; 0 where it has no rows."""
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


def _row_elements(rows: Rows, leaf: int) -> int:
    """Elements in a row of one tensor of the target, at least 1."""
    leaves = tree_flatten(rows.target)[0]
    return max(1, leaves[leaf][0].numel()) if leaf >= 0 else 1


def _widest(rows: Rows) -> int:
    """Elements in a row of the result."""
    cut = [leaf for i, leaf in enumerate(rows.result) if i not in rows.rowless]
    return sum(leaf.numel() // rows.rows for leaf in cut if isinstance(leaf, Tensor))


@contextmanager
def _undisturbed(loss_fn: Callable[..., Tensor], rows: Rows) -> Iterator[None]:
    """Run the block without autograd and autocast, and put back what a loss function may change."""
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
    snapshots = [Snapshot(module) for module in modules]
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
    """A loss function, and what it holds: in its closure, defaults and arguments, or as its object."""
    yield loss_fn
    held: list[Any] = []
    if isinstance(loss_fn, functools.partial):
        held = [loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()]
    elif isinstance(loss_fn, types.MethodType):
        held = [loss_fn.__self__]
    elif isinstance(loss_fn, types.FunctionType):
        held = [*(loss_fn.__defaults__ or ()), *(loss_fn.__kwdefaults__ or {}).values()]
        for cell in loss_fn.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
    for value in held if depth else ():
        yield from _held_by(value, depth - 1)


def _put_back(containers: Sequence[tuple[Any, Any]]) -> None:
    """Give lists, dicts and sets the contents that they had."""
    for container, before in containers:
        if isinstance(container, list):
            container[:] = before
        else:
            container.clear()
            container.update(before)
