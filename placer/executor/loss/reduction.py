"""Rules by which the losses of a batch's slices are combined into the loss of the batch.

With ``L(c)`` the loss of slice ``c`` and ``n(c)`` what the normalizer counts in its target (its rows, if
there is no normalizer), the loss of the batch is

    mean:  sum over c of  n(c) / n(batch) * L(c)
    sum:   sum over c of  L(c)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
            counted = [torch.as_tensor(self.normalizer(target)).reshape(()) for target in targets]
            # Counts on a device are copied to the host together, with one synchronization.
            device = counted[0].device if counted else None
            wide = [count.to(device, torch.float64) for count in counted]
            counts: list[float] = torch.stack(wide).tolist() if wide else []
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
                "a normalizer applies to a mean, but reduction is 'sum'",
                "leave one of them out",
            )
        return LossRule(combination="mean", normalizer=normalizer)
    return None if reduction == "auto" else LossRule(combination=cast(Combination, reduction))


# The options with which the mean of torch's ``cross_entropy`` and ``nll_loss`` is known.
_LABEL_OPTIONS = {"weight", "ignore_index", "reduction", "label_smoothing"}
_LABEL_LOSSES = (F.cross_entropy, F.nll_loss)
_LABEL_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
# Means or sums over all elements of an output and a target of the same shape.
_ELEMENT_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.soft_margin_loss,
    F.multilabel_soft_margin_loss,
)  # fmt: skip
_ELEMENT_MODULES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
    nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss,
)  # fmt: skip


def known_rule(loss_fn: Callable[..., Tensor]) -> LossRule | None:
    """The rule of torch's ``cross_entropy`` and ``nll_loss``; None for any other function.

    Their means are over the labels that are not ignored, each weighted by its class
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html). Recognised are the
    modules, the functions, and ``functools.partial`` of the functions.
    """
    options = _options(loss_fn, _LABEL_LOSSES, _LABEL_MODULES)
    if options is None or (
        isinstance(loss_fn, functools.partial) and options.keys() - _LABEL_OPTIONS
    ):
        return None
    weight, ignored = options.get("weight"), options.get("ignore_index", -100)
    return _label_rule(options.get("reduction", "mean"), weight, ignored)


def known_of_elements(
    loss_fn: Callable[..., Tensor], output: Any, target: Any, rows: int
) -> LossRule | None:
    """The rule of torch's losses of elements, such as ``mse_loss``; None for any other function.

    ``output`` and ``target`` are those of a slice with ``rows`` rows. The rule is not known if they have
    different shapes, or if there are weights, since torch broadcasts these.
    """
    options = _options(loss_fn, _ELEMENT_LOSSES, _ELEMENT_MODULES)
    if options is None or any(isinstance(value, Tensor) for value in options.values()):
        return None
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    if output.shape != target.shape or not output.dim() or output.size(0) != rows:
        return None
    match options.get("reduction", "mean"):
        case "mean" | "batchmean":
            return LossRule(combination="mean")
        case "sum":
            return LossRule(combination="sum")
    return None


def _options(
    loss_fn: Any, functions: Sequence[Any], modules: Sequence[type[nn.Module]]
) -> Mapping[str, Any] | None:
    """The options of ``loss_fn`` if it is one of ``functions``, a partial of one, or of ``modules``."""
    if type(loss_fn) in modules:
        hooked = forward_hooks(loss_fn) or forward_pre_hooks(loss_fn)
        return None if hooked else {**vars(loss_fn), **dict(loss_fn.named_buffers())}
    options: Mapping[str, Any] = {}
    if isinstance(loss_fn, functools.partial):
        if loss_fn.args or loss_fn.keywords.keys() & {"size_average", "reduce"}:
            return None
        loss_fn, options = loss_fn.func, loss_fn.keywords
    return options if any(loss_fn is function for function in functions) else None


def rows_in(leaf: Any, rows: int) -> int:
    """How many entries along dim 0 of ``leaf`` belong to each of ``rows`` rows; 0 if it has no rows."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or not rows or leaf.size(0) % rows:
        return 0
    return leaf.size(0) // rows


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
