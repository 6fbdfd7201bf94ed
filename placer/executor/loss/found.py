"""What has been found out about a loss function, kept from step to step."""

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
from placer.executor.loss.reduction import Combination, LossRule
from placer.executor.loss.trial import (
    Filling,
    Rows,
    Trial,
    depends_on_rowless,
    per_row,
    try_rows,
)
from placer.executor.loss.values import Number, SeenValues
from placer.executor.scatter import Whole
from placer.program.result import flatten_result

_BOTH: frozenset[Combination] = frozenset(("mean", "sum"))
_SAY = (
    "say how it combines rows. A mean over tokens or pixels that leaves some out, as with ignore_index, "
    "is one over a count of the target: step(..., normalizer=lambda target: (target != -100).sum()). A "
    "mean over rows that all count alike: reduction='mean'; a sum: reduction='sum'. A loss that "
    "compares rows with each other (contrastive, Dice over the batch), or adds means over different "
    "counts, needs the whole batch: one replica and one micro-batch, or placed(x)"
)


class FoundCombination:
    """How the last loss function combines rows, found by `placer.executor.loss.trial`.

    It is tried once per function and shapes, and again with each value of a target that it was not
    tried with (`SeenValues`).
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._believed: Any = None  # of the function and rule that were tried by `doubt` last
        self._fitting = _BOTH
        self._seen: dict[int, SeenValues] = {}  # by position in the flattened target

    def __deepcopy__(self, memo: dict[int, Any]) -> FoundCombination:
        return type(self)()

    def find(
        self, loss_fn: Callable[..., Tensor], output: Any, rows: int, target: Any, total: int
    ) -> Combination | None:
        """How ``loss_fn`` combines rows; None where nothing shows it, for all losses are zero or NaN.

        ``output`` is of a slice with ``rows`` rows, ``target`` that of the whole batch with ``total``.
        Raises ``PlacerError`` when it is neither a mean over rows nor a sum, or cannot be tried.
        """
        key = (_identity(loss_fn), _shapes(output, rows), _shapes(target, total))
        if key != self._key:
            self._key, self._fitting, self._seen = key, _BOTH, {}
        news = {
            position: self._seen.setdefault(position, SeenValues()).news(leaf)
            for position, leaf in enumerate(tree_flatten(target)[0])
            if per_row(leaf, total) == 1
        }
        if len(self._fitting) == 1 and not any(news.values()):
            return next(iter(self._fitting))
        try:
            self._try(loss_fn, _rows_to_try(output, rows, target, total), news)
        except PlacerError:
            self._key = None
            raise
        except Exception as error:
            self._key = None
            raise PlacerError(
                "loss_fn",
                "a batch is cut here, and how its loss is made of the losses of its slices was to be "
                f"found on a few rows, where it raised {type(error).__name__}: {error}",
                _SAY,
            ) from error
        if len(self._fitting) > 1:
            self._key = None  # nor do these values count as tried
            return None
        return next(iter(self._fitting))

    def doubt(
        self,
        loss_fn: Callable[..., Tensor],
        output: Any,
        rows: int,
        target: Any,
        total: int,
        rule: LossRule,
    ) -> None:
        """Warn when ``loss_fn`` does not combine rows by ``rule``, which the caller has given.

        It is tried once per function and shapes, on a few rows as they are, and again in the next step
        where these do not tell. What draws random numbers,
        changes by itself or cannot be tried so is not doubted.
        """
        key = (
            _identity(loss_fn),
            _identity(rule.normalizer),
            _shapes(output, rows),
            rule.combination,
        )
        if key == self._believed:
            return
        self._believed = key
        try:
            given = _rows_to_try(output, rows, target, total)
            (first,) = try_rows(loss_fn, given, Filling(), Filling(), "", rule)
            with torch.random.fork_rng():  # other random numbers: a loss that draws some shows
                torch.manual_seed(torch.initial_seed() + 1)
                (again,) = try_rows(loss_fn, given, Filling(), Filling(), "", rule)
        except Exception:  # the caller has said how it is, so as not to have it tried
            return
        losses = (first.first, first.second, first.together)
        if len(first.fitting) > 1:
            self._believed = None  # these rows do not tell: perhaps those of the next step do
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
                f"loss_fn: by the given {what} the losses {first.first:.6g} and {first.second:.6g} of two "
                f"groups of rows make {expected:.6g}, and it gives {first.together:.6g} for both together: "
                "the loss and the gradients of a batch in slices are not those of the whole batch. "
                "A sum of means over different counts, such as an auxiliary loss with ignored labels, "
                "cannot be made of slices: compute it on the output of placed(x), or with one replica and "
                "one micro-batch",
                stacklevel=6,
            )

    def _try(
        self, loss_fn: Callable[..., Tensor], rows: Rows, news: dict[int, list[Number]]
    ) -> None:
        if len(self._fitting) > 1:
            if rows.rowless and depends_on_rowless(loss_fn, rows):
                raise PlacerError(
                    "loss_fn",
                    "reads a tensor of the output that has no rows, such as a loss that the model "
                    "computed itself, so that it cannot be seen how it combines rows",
                    _SAY,
                )
            self._narrow(try_rows(loss_fn, rows, Filling(), Filling(), "of this batch"))
        for position, values in news.items():
            seen = self._seen[position]
            if values:
                fresh = seen.low is None
                seen.add(values)
                for first, second, said in _fillings(position, seen, values, fresh):
                    self._narrow(try_rows(loss_fn, rows, first, second, said))

    def _narrow(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            left = self._fitting & trial.fitting
            if not left:
                before = "" if self._fitting == _BOTH else f" (a {min(self._fitting)} before)"
                raise PlacerError(
                    "loss_fn",
                    "is neither a mean nor a sum over rows, and the batch is cut: two groups of rows "
                    f"{trial.tried} have the losses {trial.first:.6g} and {trial.second:.6g}, and "
                    f"together {trial.together:.6g}; a mean over rows would be {trial.mean:.6g}, a sum "
                    f"{trial.sum:.6g}{before}",
                    _SAY,
                )
            self._fitting = left


def _fillings(
    position: int, seen: SeenValues, news: Sequence[Number], fresh: bool
) -> list[tuple[Filling, Filling, str]]:
    """Pairs of groups whose rows a loss would count differently, if it does so by these values."""
    low, high = seen.low, seen.high
    own = Filling()
    found = []
    if fresh and isinstance(news[0], float):
        half = Filling(leaf=position, factor=0.5)
        found.append((half, own, "(in the first, targets are half of those of this batch)"))
    if low is not None and high is not None and low != high and (low in news or high in news):
        ends = Filling(leaf=position, values=[low]), Filling(leaf=position, values=[high])
        found.append((*ends, f"(targets {low:g} in the first and {high:g} in the second)"))
    labels = [x for x in news if isinstance(x, int)]
    if high is not None and len(labels) > 1:
        those = Filling(leaf=position, values=labels)
        least = Filling(leaf=position, values=[high])
        said = f"(targets from {labels[0]} to {labels[-1]} in the first and {high:g} in the second)"
        found.append((those, least, said))
    elif labels and low not in labels and high not in labels:
        one = Filling(leaf=position, values=labels)
        found.append((one, own, f"(targets {labels[0]} in the first)"))
    for value in news:
        if isinstance(value, float) and (value == 0 or value != value):
            one = Filling(leaf=position, values=[value])
            found.append((one, own, f"(targets {value:g} in the first)"))
    return found


def _rows_to_try(output: Any, rows: int, target: Any, total: int) -> Rows:
    leaves, form = flatten_result(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rowless = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not per_row(x, rows)]
    if len(rowless) == len(tensors):
        raise PlacerError(
            "loss_fn",
            "gets an output in which no tensor has the batch's rows, so that it cannot be seen how it "
            "combines them",
            _SAY,
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
        rowless=rowless,
        target=tree_map(take, target),
        total=min(2 * least, total),
    )


def _shapes(value: Any, rows: int) -> Any:
    """What the tensors of ``value`` are, but for the number of rows."""
    leaves, spec = tree_flatten(value)
    kinds = [
        (x.shape[1:] if per_row(x, rows) else x.shape, x.dtype, per_row(x, rows))
        if isinstance(x, Tensor)
        else type(x)
        for x in leaves
    ]
    return spec, kinds


class _Same:
    """Equal to another of the same, living object; it does not keep the object alive."""

    def __init__(self, value: Any) -> None:
        self._strong = None
        try:
            self._weak: Any = weakref.ref(value)
        except TypeError:
            self._weak, self._strong = None, value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        if self._weak is None:
            return other._weak is None and self._strong is other._strong
        value = self._weak()
        return value is not None and other._weak is not None and value is other._weak()

    __hash__ = None  # type: ignore[assignment]


def _identity(loss_fn: Any, depth: int = 3) -> Any:
    """What says that a loss function is the one before, also one that is made anew in every step.

    A function is its code and what it closes over; names that it reads from its module do not count.
    """
    if loss_fn is None or isinstance(loss_fn, (bool, int, float, str, torch.dtype)):
        return loss_fn
    if depth and isinstance(loss_fn, types.FunctionType):
        cells = [_contents(cell) for cell in loss_fn.__closure__ or ()]
        defaults = [*(loss_fn.__defaults__ or ()), *(loss_fn.__kwdefaults__ or {}).values()]
        return loss_fn.__code__, [_identity(x, depth - 1) for x in (*cells, *defaults)]
    if depth and isinstance(loss_fn, functools.partial):
        held = [*loss_fn.args, *loss_fn.keywords.items()]
        return _identity(loss_fn.func, depth - 1), [_identity(x, depth - 1) for x in held]
    if isinstance(loss_fn, types.MethodType):
        return loss_fn.__func__, _Same(loss_fn.__self__)
    if isinstance(loss_fn, (tuple, list)) and depth:
        return type(loss_fn), [_identity(x, depth - 1) for x in loss_fn]
    return _Same(loss_fn)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
