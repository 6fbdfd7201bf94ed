"""Rules by which the losses of a batch's slices are combined into the loss of the batch.

With ``L(c)`` the loss of slice ``c`` and ``n(c)`` what the normalizer counts in its target (its rows, if
there is no normalizer), the loss of the batch is

    mean:  sum over c of  n(c) / n(batch) * L(c)
    sum:   sum over c of  L(c)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placer._torch import forward_hooks, forward_pre_hooks
from placer.errors import PlacerError

Reduction = Literal["auto", "mean", "sum"]
Combination = Literal["mean", "sum"]
COMBINATIONS: frozenset[Combination] = frozenset(("mean", "sum"))
Normalizer = Callable[[Any], "Tensor | float"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """How losses of slices are combined. ``normalizer`` counts what a mean is over; None: rows."""

    combination: Combination
    normalizer: Normalizer | None = None

    def count(self, targets: Sequence[Any]) -> list[float]:
        """What the normalizer counts in each of ``targets``; there must be a normalizer.

        Raises ``PlacerError`` if it raises, or returns a number that is negative or not finite.
        """
        assert self.normalizer is not None
        try:
            counted = [self.normalizer(target) for target in targets]
            # Counts on a device are copied to the host together, with one synchronization.
            tensors = [x.reshape(()) for x in counted if isinstance(x, Tensor) and not x.is_cpu]
            numbers = iter(torch.stack(tensors).tolist() if tensors else ())
            on_device = [isinstance(x, Tensor) and not x.is_cpu for x in counted]
            counts = [
                float(next(numbers) if there else x)
                for x, there in zip(counted, on_device, strict=True)
            ]
        except Exception as error:
            raise PlacerError(
                "normalizer",
                f"raised {type(error).__name__} for the target: {error}",
                "it must take the target that step gets and return one number, for example "
                "lambda target: (target != -100).sum()",
            ) from error
        for count in counts:
            if not 0 <= count < float("inf"):
                raise PlacerError(
                    "normalizer", f"counts {count}", "return a finite count, 0 or more"
                )
        return counts


def given_rule(reduction: str, normalizer: Normalizer | None) -> LossRule | None:
    """The rule that the caller gives; None for ``"auto"``.

    Raises ``PlacerError`` for an unknown reduction, and for a sum with a normalizer.
    """
    if reduction not in get_args(Reduction):
        problem = f"reduction is {reduction!r}"
        raise PlacerError("step", problem, "use 'auto', 'mean' or 'sum'")
    if normalizer is not None:
        if reduction == "sum":
            raise PlacerError(
                "step",
                "a normalizer says what a mean is over, and reduction is 'sum'",
                "leave one of them out",
            )
        return LossRule(combination="mean", normalizer=normalizer)
    return None if reduction == "auto" else LossRule(combination=cast(Combination, reduction))


def known_rule(loss_fn: Callable[..., Tensor]) -> LossRule | None:
    """The rule of torch's ``cross_entropy`` and ``nll_loss``; None for any other function.

    Their means are over the labels that are not ignored, each weighted by its class
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html). Recognised are the
    modules, the functions, and ``functools.partial`` of the functions.
    """
    if type(loss_fn) in (nn.CrossEntropyLoss, nn.NLLLoss):
        module = cast("nn.CrossEntropyLoss | nn.NLLLoss", loss_fn)
        if forward_hooks(module) or forward_pre_hooks(module):
            return None
        return _label_rule(module.reduction, module.weight, module.ignore_index)
    options: dict[str, Any] = {}
    if isinstance(loss_fn, functools.partial):
        options = loss_fn.keywords
        if loss_fn.args or not options.keys() <= _LABEL_OPTIONS:
            return None
        loss_fn = loss_fn.func
    if loss_fn in (F.cross_entropy, F.nll_loss):
        return _label_rule(
            options.get("reduction", "mean"),
            options.get("weight"),
            options.get("ignore_index", -100),
        )
    return None


_LABEL_OPTIONS = {"weight", "ignore_index", "reduction", "label_smoothing"}


def _label_rule(reduction: str, weight: Tensor | None, ignore_index: int) -> LossRule | None:
    if reduction == "sum":
        return LossRule(combination="sum")
    if reduction != "mean":
        return None

    def count(target: Any) -> Tensor | float:
        if not isinstance(target, Tensor):
            return 0.0  # the loss itself will raise an error
        if target.is_floating_point():  # class probabilities, for which the mean is over rows
            return len(target)
        kept = target != ignore_index
        if weight is None:
            return kept.sum()
        return weight.detach()[target[kept].to(weight.device)].sum()

    return LossRule(combination="mean", normalizer=count)
