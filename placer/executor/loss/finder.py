"""Keeps how a loss function combines the rows of a batch, as a trial showed it."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from placer.errors import PlacerError
from placer.executor.loss.call import objects_of
from placer.executor.loss.reduction import Combination, LossRule
from placer.executor.loss.trial import NO_ROWS, BatchRows, Values, joined, try_rows

_REMEDY = (
    "tell step how it combines rows. For a mean over tokens or pixels that skips some of them, as with "
    "ignore_index, pass what counts them: normalizer=lambda target: (target != -100).sum(). For a "
    "mean over rows pass reduction='mean', for a sum reduction='sum'. A loss that "
    "compares rows with each other (contrastive, Dice over the batch), or adds means over different "
    "counts, needs the whole batch: pass whole_batch=True"
)


class CombinationFinder:
    """Finds how a loss function combines rows, by a trial (`placer.executor.loss.trial`).

    A function is tried once, and again if a target has values that were in no trial (a label that is
    ignored, say), or if shapes change.
    """

    def __init__(self) -> None:
        self._tried: _Tried | None = None
        self._values: list[Values] = []  # of each leaf of the target
        self._found: Combination | None = None
        self._checked: _Tried | None = None  # what `check_given` has tried

    def __deepcopy__(self, memo: dict[int, Any]) -> CombinationFinder:
        return type(self)()

    def find(
        self, loss_fn: Callable[..., Tensor], given: BatchRows, loss: Tensor
    ) -> Combination | None:
        """How ``loss_fn`` combines rows; None if ``loss``, that of the slice, is zero, infinite or NaN.

        Raises ``PlacerError`` if it is neither a mean over rows nor a sum, or if a trial does not show it.
        """
        try:
            tried, values = _Tried(given.shapes(), loss_fn), given.values()
            if tried == self._tried:
                values = list(map(joined, self._values, values))
                if values == self._values:
                    return self._found
            self._tried = None  # until a trial has shown something
            (trial,) = try_rows(loss_fn, given, values)
        except PlacerError as error:
            raise PlacerError(error.where, error.problem, error.remedy or _REMEDY) from None
        except Exception as error:
            raise PlacerError(
                "loss_fn",
                "was tried on a few rows, to find how the losses of slices make the loss of the batch, "
                f"and raised {type(error).__name__}: {error}",
                _REMEDY,
            ) from error
        if not trial.fitting:
            raise PlacerError(
                "loss_fn",
                "is neither a mean nor a sum over rows, and the batch is sliced: two groups of rows, with "
                f"values of this target, have the losses {trial.first:.6g} and {trial.second:.6g}, and "
                f"together {trial.together:.6g}; a mean over rows would be {trial.mean:.6g}, a sum "
                f"{trial.sum:.6g}",
                _REMEDY,
            )
        if len(trial.fitting) > 1:
            if loss.isfinite() and loss != 0:
                nothing = " (as the mean of nothing is)" if math.isnan(trial.together) else ""
                shown = f"is {trial.together:g}{nothing} on a few rows, which does not show how it "
                shown += "combines them"
                raise PlacerError("loss_fn", shown if given.is_complete else NO_ROWS, _REMEDY)
            return None
        self._tried, self._values, (self._found,) = tried, values, trial.fitting
        return self._found

    def check_given(self, loss_fn: Callable[..., Tensor], given: BatchRows, rule: LossRule) -> None:
        """Warn if ``loss_fn`` does not combine rows by ``rule``, which the caller has given.

        Tries the function once for the same shapes, and again in the next step if these rows do not tell.
        There is no warning for a function that is random, that changes from call to call, or that fails
        on a few rows.
        """
        tried = _Tried([rule.combination, *given.shapes()], loss_fn, rule.normalizer)
        if tried == self._checked:
            return
        self._checked = tried
        try:
            trial, again = try_rows(loss_fn, given, given.values(), rule, times=2)
        except Exception:  # the caller may have given the rule because the loss cannot be tried
            return
        if len(trial.fitting) > 1:
            self._checked = None  # these rows do not tell: perhaps those of the next step do
        losses = (trial.first, trial.second, trial.together)
        if (
            rule.combination in trial.fitting
            or trial != again
            or not all(map(math.isfinite, losses))
        ):
            return
        expected = trial.mean if rule.combination == "mean" else trial.sum
        what = "normalizer" if rule.normalizer is not None else f"reduction={rule.combination!r}"
        warnings.warn(
            f"loss_fn: two groups of rows have the losses {trial.first:.6g} and {trial.second:.6g}; by "
            f"the given {what} both together should have the loss {expected:.6g}, but they have "
            f"{trial.together:.6g}. "
            "The loss and the gradients of a sliced batch are not those of the whole batch. "
            "A sum of means over different counts, such as an auxiliary loss with ignored labels, "
            "cannot be computed in slices: pass whole_batch=True",
            stacklevel=6,
        )


class _Tried:
    """What was tried: functions, with the shapes of their arguments.

    Equal for the same functions, also if they are made anew in every step of the same code and objects.
    Does not keep objects alive.
    """

    def __init__(self, shapes: list[Any], *functions: Any) -> None:
        self._shapes = shapes
        self._objects = [_reference(held) for each in functions for held in objects_of(each)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tried) or len(self._objects) != len(other._objects):
            return False
        same = all(a is b for a, b in zip(self._objects, other._objects, strict=True))
        return same and self._shapes == other._shapes

    __hash__ = None  # type: ignore[assignment]


def _reference(value: object) -> object:
    """The same object for the same ``value``, as long as that is alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value
