"""Keeps how a loss function combines the rows of a batch, as a trial showed it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from placer.errors import PlacerError
from placer.executor.loss.call import objects_of
from placer.executor.loss.reduction import Combination
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
            trial = try_rows(loss_fn, given, values)
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


class _Tried:
    """What was tried: a function, with the shapes of its arguments.

    Equal for the same function, also if it is made anew in every step of the same code and objects. Does not
    keep objects alive.
    """

    def __init__(self, shapes: list[Any], function: Any) -> None:
        self._shapes = shapes
        self._objects = [_reference(held) for held in objects_of(function)]

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
