"""Tries a loss function on a few rows, to find how it combines the rows of a batch.

The function is called for two groups of rows, each alone and both together. The three losses show whether
it is a mean over rows, a sum, or neither. Rows of outputs are the model's own, in the second group with large
random numbers added, so that the losses of the groups differ even where outputs are all alike, as those of a
model that was not trained yet. Outputs of which none is negative are averaged with numbers in [0, 1] instead
(positive ones, and those in [0, 1], stay such), and so are all if the loss of large ones is not finite.

Targets are rows of the batch's: in the first group with all labels that the batch has put into them, or the
least and the largest number, zero and NaN, and a third of all elements the least; in the second with the
largest value alone. So a label that is ignored (``ignore_index``) or weighted shows, however rare it is, also
if the loss leaves out the first token or the border of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from placer.errors import PlacerError
from placer.executor.loss.call import call_loss, objects_of
from placer.executor.loss.reduction import COMBINATIONS, Combination, rows_in
from placer.generators import random_state, set_random_state
from placer.program import Batched, Whole, unmarked
from placer.program.objects.python_random import keep_random
from placer.program.objects.reachable import find_reachable_state
from placer.program.objects.restore import Snapshot, module_roots
from placer.program.result import flatten_result

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}  # relative; losses may compute in float32
_SPREAD = 16  # of the numbers that are added to outputs
_COARSE = 2e-2  # for 16-bit losses
NO_ROWS = (
    "gets an output in which not every tensor has the batch's rows (a loss that the model computed itself "
    "has none), so a trial does not show how it combines rows"
)
_MOST_ELEMENTS = 2**22  # of a group's outputs, unless one row has more
_MOST_LABELS = 256
_MOST_RANGE = 2**20  # of labels, for ``torch.bincount``

Values = frozenset[int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """The ``output`` of a slice with ``rows`` rows, and the ``target`` of the batch with ``total``."""

    output: Any
    rows: int
    target: Any
    total: int

    @property
    def is_complete(self) -> bool:
        """Has every tensor of the output the batch's rows?"""
        leaves = flatten_result(self.output)[0]
        return all(rows_in(leaf, self.rows) for leaf in leaves if isinstance(leaf, Tensor))

    def shapes(self) -> list[Any]:
        """The shapes and dtypes of all tensors, without the numbers of rows."""
        return [
            (leaf.shape[1:] if rows_in(leaf, rows) else leaf.shape, leaf.dtype)
            for value, rows in ((self.output, self.rows), (self.target, self.total))
            for leaf in tree_flatten(value)[0]
            if isinstance(leaf, Tensor)
        ]

    def values(self) -> list[Values]:
        """The values of each leaf of the target for which a loss may treat rows differently.

        All labels; of floating-point numbers the least and the largest, and zero and NaN if there are
        any. Raises ``PlacerError`` if there are too many labels to try.
        """
        leaves = tree_flatten(self.target)[0]
        return [
            _values_of(leaf.detach().flatten()) if rows_in(leaf, self.total) == 1 else frozenset()
            for leaf in leaves
        ]


def _values_of(tensor: Tensor) -> Values:
    if not tensor.numel() or tensor.is_complex():
        return frozenset()
    if tensor.is_floating_point():
        has_zero = (tensor == 0).any().to(tensor.dtype)
        low, high, zeros = torch.stack([*tensor.aminmax(), has_zero]).tolist()
        if math.isnan(low):
            return _values_of(tensor[~tensor.isnan()]) | {math.nan}
        return frozenset([low, high, 0.0] if zeros else [low, high])
    tensor = tensor.to(torch.int64)
    low, high = (int(x) for x in torch.stack(tensor.aminmax()).tolist())
    if high - low < _MOST_RANGE:
        labels = torch.bincount(tensor - low).nonzero().flatten() + low
        if len(labels) <= _MOST_LABELS:
            return frozenset(labels.tolist())
    raise PlacerError(
        "loss_fn",
        f"gets a target with more than {_MOST_LABELS} labels, too many to try whether it ignores some",
    )


def joined(tried: Values, values: Values) -> Values:
    """The values of both; of floating-point numbers the least, the largest, zero and NaN."""
    both = tried | values
    numbers = [value for value in both if isinstance(value, float) and not math.isnan(value)]
    return both & {math.nan, 0.0} | {min(numbers), max(numbers)} if numbers else both


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The losses of two groups of rows, each alone and both together."""

    first: float
    second: float
    together: float
    share: float  # of the rows, that the first group has
    tolerance: float  # relative

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
    given: BatchRows,
    values: Sequence[Values],
    *,
    spread: float = _SPREAD,
) -> Trial:
    """Try ``loss_fn``, with these ``values`` in each leaf of the target.

    Tensors of the output without the batch's rows are NaN, and so is a loss that depends on them. Raises what
    ``loss_fn`` raises, and ``PlacerError`` for an output without rows. Afterwards random states
    are what they were, and so is what ``loss_fn`` holds or reads: variables, modules, objects, containers.
    """
    outputs, form = flatten_result(given.output)
    targets, spec = tree_flatten(given.target)
    tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
    if not any(rows_in(tensor, given.rows) for tensor in tensors):
        raise PlacerError("loss_fn", NO_ROWS)
    device = tensors[0].device
    first, second = _group_sizes(given, values)
    outputs = [_output_rows(leaf, given.rows, first, second, spread) for leaf in outputs]
    targets = [
        _target_rows(leaf, given.total, tried, first, second, device)
        for leaf, tried in zip(targets, values, strict=True)
    ]

    tolerances: list[float] = []

    def loss(start: int, stop: int) -> float:
        output = form.unflatten(_take(outputs, start, stop, first + second))
        target = tree_unflatten(_take(targets, start, stop, first + second), spec)
        found = call_loss(loss_fn, output, unmarked(target))
        tolerances.append(_TOLERANCE.get(found.dtype, _COARSE))
        return float(found)

    with _undone(loss_fn, device):
        trial = Trial(
            together=loss(0, first + second),
            first=loss(0, first),
            second=loss(first, first + second),
            share=first / (first + second),
            tolerance=max(tolerances),
        )
    if spread and not math.isfinite(trial.second):  # such as the arc cosine of a large number
        return try_rows(loss_fn, given, values, spread=0.0)
    return trial


def _group_sizes(given: BatchRows, values: Sequence[Values]) -> tuple[int, int]:
    """The numbers of rows in the two groups, so that all ``values`` have room in the first."""
    leaves = [leaf for leaf in tree_flatten(given.output)[0] if isinstance(leaf, Tensor)]
    elements = sum(leaf.numel() // given.rows for leaf in leaves if rows_in(leaf, given.rows))
    least = 1 if elements > _MOST_ELEMENTS else min(given.rows, 2)
    needed = [
        # Two periods, so that a value that a loss leaves out in one place is also in another.
        -(-2 * _period(len(tried), leaf[0].numel()) // leaf[0].numel())
        for leaf, tried in zip(tree_flatten(given.target)[0], values, strict=True)
        if tried
    ]
    first = max([least, *needed])
    if first > least and first * elements > _MOST_ELEMENTS:
        raise PlacerError("loss_fn", "gets rows that are too large to try it with every label")
    return first, least


def _period(values: int, elements: int) -> int:
    """After how many elements of a target its ``values`` come again; a third are the least, a third its own.

    It has no divisor in common with the ``elements`` of a row, so values are at other places in each row.
    """
    return next(number for number in count(3 * values) if math.gcd(number, elements) == 1)


def _output_rows(leaf: Any, rows: int, first: int, second: int, spread: float) -> Any:
    """Rows for both groups, those of the second with random numbers; in float32 if in 16 bits."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not rows_in(leaf, rows):
        return torch.full_like(leaf, math.nan) if leaf.is_floating_point() else leaf
    by_row = leaf.detach().unflatten(0, (rows, -1))
    found = by_row[torch.arange(first + second, device=leaf.device) % rows]
    if found.is_floating_point():
        found = found.float() if found.element_size() == 2 else found
        generator = torch.Generator(found.device).manual_seed(0)
        mixed = found[first:]
        noise = torch.rand(mixed.shape, dtype=mixed.dtype, device=mixed.device, generator=generator)
        if spread and (found < 0).any():
            mixed.add_(noise, alpha=spread).sub_(spread / 2)
        else:
            mixed.add_(noise).div_(2)
    return found.flatten(0, 1)


def _target_rows(
    leaf: Any, total: int, values: Values, first: int, second: int, device: torch.device
) -> Any:
    """Rows for both groups, with all ``values`` put into those of the first; the second has the largest."""
    if isinstance(leaf, Whole):
        return Whole(tree_map_only(Tensor, lambda x: x.detach().to(device), leaf.value))
    if isinstance(leaf, Batched):
        found = leaf.value.movedim(leaf.dim, 0)
        found = _target_rows(found, total, values, first, second, device)
        return replace(leaf, value=found.movedim(0, leaf.dim))
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().to(device)
    if rows_in(leaf, total) != 1:
        return leaf
    found = leaf[torch.arange(first + second, device=device) % total]
    if values:
        ordered = sorted(values, key=lambda value: (math.isnan(value), value))
        largest = next(value for value in (*reversed(ordered), 0.0) if not math.isnan(value))
        tried = torch.tensor(ordered + ordered[:1] * len(ordered)).to(found)
        flat, period = found[:first].view(-1), _period(len(ordered), found[0].numel())
        periods = flat[: len(flat) // period * period].view(-1, period)
        periods[:, : len(tried)] = tried
        found[first:] = largest
    return found


def _take(leaves: Sequence[Any], start: int, stop: int, rows: int) -> list[Any]:
    """Copies of rows of those leaves that have them; a loss may write to what it gets."""
    taken = []
    for leaf in leaves:
        if isinstance(leaf, Batched):
            taken.append(leaf.value.narrow(leaf.dim, start, stop - start).clone())
            continue
        each = rows_in(leaf, rows)
        taken.append(leaf[start * each : stop * each].clone() if each else leaf)
    return taken


@contextmanager
def _undone(loss_fn: Callable[..., Tensor], device: torch.device) -> Iterator[None]:
    """Run the block without autograd and autocast; then restore what `try_rows` says."""
    code = find_reachable_state(nn.Module(), {"loss_fn": loss_fn})
    held = [*objects_of(loss_fn), *(each.read() for each in code.objects)]
    modules = [x for x in held if isinstance(x, nn.Module)]
    snapshot = Snapshot([root for module in modules for root in module_roots(module)], code)
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    state = random_state(device)
    try:
        with keep_random(), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        set_random_state(device, state)
        snapshot.restore()
        for buffer, before in buffers:
            if not torch.equal(buffer, before):  # the loss may have saved it for its backward
                buffer.copy_(before)
