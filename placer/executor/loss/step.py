"""The loss of one step: each slice's loss, weighted so that their sum is the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.loss.call import call_loss, require_function, without_graph
from placer.executor.loss.finder import CombinationFinder
from placer.executor.loss.reduction import (
    Combination,
    LossRule,
    Normalizer,
    given_rule,
    known_of_elements,
    known_rule,
)
from placer.executor.loss.trial import BatchRows
from placer.program import result_tensors


class StepLoss:
    """A loss function for one step, and the rule by which it combines rows.

    With ``whole_batch`` it is called once, for the results of all slices together.

    Call `count` and `begin` first, then `of_slice` for every slice. Raises ``PlacerError`` for options
    that contradict each other.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        *,
        reduction: str = "auto",
        normalizer: Normalizer | None = None,
        found: CombinationFinder | None = None,
        whole_batch: bool = False,
    ) -> None:
        require_function(loss_fn)
        if whole_batch and (reduction != "auto" or normalizer is not None):
            raise PlacerError(
                "step",
                "reduction and normalizer say how losses of slices are combined, and with "
                "whole_batch=True there is one loss",
                "leave them out",
            )
        self.whole_batch = whole_batch
        self._loss_fn = loss_fn
        # The caller's options, which ranks compare with each other:
        self.reduction, self.has_normalizer = reduction, normalizer is not None
        self._rule = given_rule(reduction, normalizer) or known_rule(loss_fn)
        self._found = CombinationFinder() if found is None else found
        self._has_graph: bool | None = None  # None: the function has not been called
        self._target: Any = None
        self._rows: int | None = None
        self._total: int | None = None
        self._counted: float | None = None
        self.combination: Combination | None = self._rule.combination if self._rule else None
        # Whether there are several slices, and what the normalizer has counted in them so far:
        self.is_sliced = False
        self.counts = 0.0

    def count(self, targets: Sequence[Any]) -> Sequence[float | None]:
        """What the normalizer counts in each of ``targets``; None for each if there is no normalizer."""
        if self.whole_batch or self._rule is None or self._rule.normalizer is None:
            return [None] * len(targets)
        return self._rule.count(targets)

    def begin(
        self, target: Any, *, rows: int | None, total: int | None, counted: float | None
    ) -> None:
        """Begin a batch of ``total`` rows, of which this process has ``rows``; None: it has no rows.

        ``target`` is the caller's target for these rows, ``counted`` is what the normalizer counts in the
        whole batch.
        """
        self._target, self._rows, self._total, self._counted = target, rows, total, counted

    def of_slice(
        self, output: Any, target: Any, *, rows: int | None, counted: float | None = None
    ) -> Tensor:
        """The weighted loss of a slice with ``rows`` rows; those of all slices add up to the batch's loss.

        ``counted`` is what the normalizer counts in the slice's target, from `count`. Raises
        ``PlacerError`` if the loss is not a scalar, or if its rule cannot be found.
        """
        given = result_tensors(output) if counted == 0.0 else ()  # before the loss can write to it
        loss = call_loss(self._loss_fn, output, target)
        self._has_graph = bool(self._has_graph or loss.requires_grad)
        if self.whole_batch or self._total is None or rows is None or rows == self._total:
            return loss  # the whole batch
        self.is_sliced = True
        rule = self._rule or self._find(output, target, rows, loss)
        if rule.combination == "sum":
            return loss
        self.counts += counted or 0.0
        # A mean over nothing is NaN, as for the whole batch.
        if counted is None or not self._counted:
            return loss * (rows / self._total)
        if counted == 0.0:
            # The loss is NaN here, and 0 * NaN is NaN. Return a zero whose gradients are zeros.
            leaves = [x for x in given if x.requires_grad]
            zeros = [leaf.reshape(-1)[:0].sum().to(loss) for leaf in leaves]
            return torch.stack(zeros).sum() if zeros else torch.zeros_like(loss)
        return loss * (counted / self._counted)

    def _find(self, output: Any, target: Any, rows: int, loss: Tensor) -> LossRule:
        self._rule = known_of_elements(self._loss_fn, output, target, rows)
        if self._rule is None:
            assert self._rows is not None
            given = BatchRows(output=output, rows=rows, target=self._target, total=self._rows)
            found = self._found.find(self._loss_fn, given, loss)
            self._rule = LossRule(combination=found or "mean")
            self.combination = found
        else:
            self.combination = self._rule.combination
        return self._rule

    @property
    def lacks_graph(self) -> bool:
        """Whether the function was called and none of its losses requires gradients."""
        return self._has_graph is False

    def require_graph(self) -> None:
        """Raise ``PlacerError`` if no loss requires gradients; eager's ``backward`` raises too."""
        if self.lacks_graph:
            raise without_graph()

    def require_count(self, counts: float) -> None:
        """Raise ``PlacerError`` if ``counts``, the sum over all slices, differs from the batch's count."""
        whole = self._counted
        if whole is not None and abs(counts - whole) > 1e-4 * max(abs(counts), whole):
            raise PlacerError(
                "normalizer",
                f"counts {counts:g} in all slices of the batch together, but {whole:g} in the whole batch",
                "have it count items of the target, so that the counts of slices add up",
            )
