"""Finds how a loss function combines the rows of a batch, and caches the answer between steps."""

from __future__ import annotations

import functools
import math
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from placer.errors import PlacerError
from placer.executor.loss.call import bound_values
from placer.executor.loss.reduction import COMBINATIONS, Combination, LossRule
from placer.executor.loss.trial import (
    Rows,
    TargetFill,
    Trial,
    depends_on_tensors_without_rows,
    per_row,
    try_rows,
)
from placer.executor.loss.values import Number, SeenValues
from placer.executor.scatter import Whole
from placer.program.result import flatten_result

_REMEDY = (
    "tell step how it combines rows. For a mean over tokens or pixels that skips some of them, as with "
    "ignore_index, pass what counts them: normalizer=lambda target: (target != -100).sum(). For a "
    "mean over rows pass reduction='mean', for a sum reduction='sum'. A loss that "
    "compares rows with each other (contrastive, Dice over the batch), or adds means over different "
    "counts, needs the whole batch: use one replica and one micro-batch, or placed(x)"
)


class CombinationFinder:
    """Finds how a loss function combines rows, by trials (`placer.executor.loss.trial`).

    Keeps the answer for the last function. A function is tried once for the same shapes, and again when
    a target has values with which it has not been tried (`SeenValues`).
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._checked_key: Any = None  # the function and rule that `check_given` tried last
        self._fitting = COMBINATIONS  # those that no trial has excluded
        self._seen: dict[int, SeenValues] = {}  # by position in the flattened target

    def __deepcopy__(self, memo: dict[int, Any]) -> CombinationFinder:
        return type(self)()

    def find(
        self, loss_fn: Callable[..., Tensor], output: Any, rows: int, target: Any, total: int
    ) -> Combination | None:
        """How ``loss_fn`` combines rows; None if it cannot be told because all losses are zero or NaN.

        ``output`` is that of a slice with ``rows`` rows, ``target`` that of the whole batch with ``total``
        rows. Raises ``PlacerError`` if ``loss_fn`` is neither a mean over rows nor a sum, or cannot be
        tried.
        """
        key = (_identity(loss_fn), _shapes(output, rows), _shapes(target, total))
        if key != self._key:
            self._key, self._fitting, self._seen = key, COMBINATIONS, {}
        new_values = {
            position: self._seen.setdefault(position, SeenValues()).new_values(leaf)
            for position, leaf in enumerate(tree_flatten(target)[0])
            if per_row(leaf, total) == 1
        }
        if len(self._fitting) == 1 and not any(new_values.values()):
            return next(iter(self._fitting))
        try:
            self._try(loss_fn, _rows_to_try(output, rows, target, total), new_values)
        except PlacerError:
            self._key = None
            raise
        except Exception as error:
            self._key = None
            raise PlacerError(
                "loss_fn",
                "was tried on a few rows, to find how the losses of slices make the loss of the batch, "
                f"and raised {type(error).__name__}: {error}",
                _REMEDY,
            ) from error
        if len(self._fitting) > 1:
            self._key = None  # forget the values too: they have not shown anything
            return None
        return next(iter(self._fitting))

    def check_given(
        self,
        loss_fn: Callable[..., Tensor],
        output: Any,
        rows: int,
        target: Any,
        total: int,
        rule: LossRule,
    ) -> None:
        """Warn if ``loss_fn`` does not combine rows by ``rule``, which the caller has given.

        Tries the function once for the same shapes, on a few rows, and again in the next step if these
        rows do not tell. There is no warning for a function that is random, that changes from call to
        call, or that fails on a few rows.
        """
        key = (
            _identity(loss_fn),
            _identity(rule.normalizer),
            _shapes(output, rows),
            rule.combination,
        )
        if key == self._checked_key:
            return
        self._checked_key = key
        try:
            given = _rows_to_try(output, rows, target, total)
            (first,) = try_rows(loss_fn, given, TargetFill(), TargetFill(), "", rule)
            # With another seed, so that a random loss gives another value.
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                torch.manual_seed(torch.initial_seed() + 1)
                (again,) = try_rows(loss_fn, given, TargetFill(), TargetFill(), "", rule)
        except Exception:  # the caller may have given the rule because the loss cannot be tried
            return
        losses = (first.first, first.second, first.together)
        if len(first.fitting) > 1:
            self._checked_key = None  # these rows do not tell: perhaps those of the next step do
        if (
            first == again
            and all(map(math.isfinite, losses))
            and rule.combination not in first.fitting
        ):
            expected = first.mean if rule.combination == "mean" else first.sum
            what = (
                "normalizer" if rule.normalizer is not None else f"reduction={rule.combination!r}"
            )
            warnings.warn(
                f"loss_fn: two groups of rows have the losses {first.first:.6g} and {first.second:.6g}; by "
                f"the given {what} both together should have the loss {expected:.6g}, but they have "
                f"{first.together:.6g}. "
                "The loss and the gradients of a sliced batch are not those of the whole batch. "
                "A sum of means over different counts, such as an auxiliary loss with ignored labels, "
                "cannot be computed in slices: compute it on the output of placed(x), or with one replica "
                "and one micro-batch",
                stacklevel=6,
            )

    def _try(
        self, loss_fn: Callable[..., Tensor], rows: Rows, new_values: dict[int, list[Number]]
    ) -> None:
        if len(self._fitting) > 1:
            if rows.without_rows and depends_on_tensors_without_rows(loss_fn, rows):
                raise PlacerError(
                    "loss_fn",
                    "reads a tensor of the output that has no rows, such as a loss that the model "
                    "computed itself, so a trial cannot show how it combines rows",
                    _REMEDY,
                )
            self._narrow(try_rows(loss_fn, rows, TargetFill(), TargetFill(), "of this batch"))
        for position, values in new_values.items():
            seen = self._seen[position]
            if values:
                fresh = seen.low is None
                seen.add(values)
                for first, second, said in _target_fills(position, seen, values, fresh):
                    self._narrow(try_rows(loss_fn, rows, first, second, said))

    def _narrow(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            left = self._fitting & trial.fitting
            if not left:
                before = (
                    "" if self._fitting == COMBINATIONS else f" (a {min(self._fitting)} before)"
                )
                raise PlacerError(
                    "loss_fn",
                    "is neither a mean nor a sum over rows, and the batch is sliced: two groups of rows "
                    f"{trial.tried} have the losses {trial.first:.6g} and {trial.second:.6g}, and "
                    f"together {trial.together:.6g}; a mean over rows would be {trial.mean:.6g}, a sum "
                    f"{trial.sum:.6g}{before}",
                    _REMEDY,
                )
            self._fitting = left


def _target_fills(
    position: int, seen: SeenValues, new_values: Sequence[Number], fresh: bool
) -> list[tuple[TargetFill, TargetFill, str]]:
    """Pairs of groups of rows for a trial with the values ``new_values`` in one tensor of the target.

    A loss that counts rows with some of these values differently shows it in one of the pairs. The text
    of each pair describes it in error messages.
    """
    low, high = seen.low, seen.high
    own = TargetFill()
    found = []
    if fresh and isinstance(new_values[0], float):
        half = TargetFill(leaf=position, factor=0.5)
        found.append((half, own, "(in the first, targets are half of those of this batch)"))
    if (
        low is not None
        and high is not None
        and low != high
        and (low in new_values or high in new_values)
    ):
        ends = TargetFill(leaf=position, values=[low]), TargetFill(leaf=position, values=[high])
        found.append((*ends, f"(targets {low:g} in the first and {high:g} in the second)"))
    labels = [x for x in new_values if isinstance(x, int)]
    if high is not None and len(labels) > 1:
        those = TargetFill(leaf=position, values=labels)
        least = TargetFill(leaf=position, values=[high])
        said = f"(targets from {labels[0]} to {labels[-1]} in the first and {high:g} in the second)"
        found.append((those, least, said))
    elif labels and low not in labels and high not in labels:
        one = TargetFill(leaf=position, values=labels)
        found.append((one, own, f"(targets {labels[0]} in the first)"))
    for value in new_values:
        if isinstance(value, float) and (value == 0 or value != value):
            one = TargetFill(leaf=position, values=[value])
            found.append((one, own, f"(targets {value:g} in the first)"))
    return found


def _rows_to_try(output: Any, rows: int, target: Any, total: int) -> Rows:
    leaves, form = flatten_result(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    without_rows = [
        i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not per_row(x, rows)
    ]
    if len(without_rows) == len(tensors):
        raise PlacerError(
            "loss_fn",
            "gets an output in which no tensor has the batch's rows, so a trial cannot show how it "
            "combines them",
            _REMEDY,
        )
    device = next(x.device for i, x in enumerate(leaves) if per_row(x, rows))
    least = min(rows, 2)

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Whole):
            return Whole(tree_map_only(Tensor, lambda x: x.detach().to(device), leaf.value))
        if not isinstance(leaf, Tensor):
            return leaf
        return (leaf[: 2 * least] if per_row(leaf, total) == 1 else leaf).detach().to(device)

    return Rows(
        result=leaves,
        format=form,
        rows=rows,
        without_rows=without_rows,
        target=tree_map(take, target),
        total=min(2 * least, total),
    )


def _shapes(value: Any, rows: int) -> Any:
    """The structure, shapes and dtypes of ``value``, without the number of rows."""
    leaves, spec = tree_flatten(value)
    kinds = [
        (x.shape[1:] if per_row(x, rows) else x.shape, x.dtype, per_row(x, rows))
        if isinstance(x, Tensor)
        else type(x)
        for x in leaves
    ]
    return spec, kinds


class _SameObject:
    """Equal to another one for the same object, as long as that is alive; does not keep it alive.

    (It does keep alive objects to which there are no weak references.)
    """

    def __init__(self, value: Any) -> None:
        self._strong = None
        try:
            self._weak: Any = weakref.ref(value)
        except TypeError:
            self._weak, self._strong = None, value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SameObject):
            return NotImplemented
        if self._weak is None:
            return other._weak is None and self._strong is other._strong
        value = self._weak()
        return value is not None and other._weak is not None and value is other._weak()

    __hash__ = None  # type: ignore[assignment]


def _identity(loss_fn: Any, depth: int = 3) -> Any:
    """A key that is equal for the same loss function, also if it is created anew in every step.

    A function is identified by its code, its closure and its defaults, not by the globals it reads.
    """
    if loss_fn is None or isinstance(loss_fn, (bool, int, float, str, torch.dtype)):
        return loss_fn
    if depth and isinstance(loss_fn, types.FunctionType):
        return loss_fn.__code__, [_identity(x, depth - 1) for x in bound_values(loss_fn)]
    if depth and isinstance(loss_fn, functools.partial):
        held = [*loss_fn.args, *loss_fn.keywords.items()]
        return _identity(loss_fn.func, depth - 1), [_identity(x, depth - 1) for x in held]
    if isinstance(loss_fn, types.MethodType):
        return loss_fn.__func__, _SameObject(loss_fn.__self__)
    if isinstance(loss_fn, (tuple, list)) and depth:
        return type(loss_fn), [_identity(x, depth - 1) for x in loss_fn]
    return _SameObject(loss_fn)
