"""The loss of one step: called per slice, weighted so that the slices' losses make that of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.loss.call import call_loss, without_graph
from placer.executor.loss.found import FoundCombination
from placer.executor.loss.reduction import (
    Combination,
    LossRule,
    Normalizer,
    given_rule,
    known_rule,
)
from placer.program import result_tensors


class StepLoss:
    """A loss function, what is said or known of how it combines rows, and what became of it in a step.

    `count` and `begin` come first, then `of_slice` for every slice. Raises ``PlacerError`` for options
    that do not go together.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        *,
        reduction: str = "auto",
        normalizer: Normalizer | None = None,
        found: FoundCombination | None = None,
    ) -> None:
        self._loss_fn = loss_fn
        # What the caller said, to compare between ranks:
        self.reduction, self.has_normalizer = reduction, normalizer is not None
        given = given_rule(reduction, normalizer)
        self._is_given = given is not None and found is not None
        self._rule = given or known_rule(loss_fn)
        self._found = FoundCombination() if found is None else found
        self._has_graph: bool | None = None  # None: it was not called
        self._target: Any = None
        self._rows: int | None = None
        self._total: int | None = None
        self._counted: float | None = None
        self.combination: Combination | None = self._rule.combination if self._rule else None
        # Of the slices so far: is the batch cut, and what did the normalizer count in them?
        self.is_cut = False
        self.counts = 0.0

    def count(self, targets: Sequence[Any]) -> Sequence[float | None]:
        """What the normalizer counts in each of ``targets``; None where there is no normalizer."""
        if self._rule is None or self._rule.normalizer is None:
            return [None] * len(targets)
        return self._rule.count(targets)

    def begin(
        self, target: Any, *, rows: int | None, total: int | None, counted: float | None
    ) -> None:
        """A batch of ``total`` rows comes (None: one without rows), of which this process has ``rows``.

        ``target`` is that of these rows as the caller gave it, ``counted`` what the normalizer counts in
        the whole batch.
        """
        self._target, self._rows, self._total, self._counted = target, rows, total, counted

    def of_slice(
        self, output: Any, target: Any, *, rows: int | None, counted: float | None = None
    ) -> Tensor:
        """The part of the batch's loss that a slice with ``rows`` rows has.

        ``counted`` is what the normalizer counts in its target, from `count`. Raises ``PlacerError`` when
        the loss is not one number, or when it cannot be found out how it combines rows.
        """
        given = result_tensors(output) if counted == 0.0 else ()  # before the loss may write to it
        loss = call_loss(self._loss_fn, output, target)
        self._has_graph = bool(self._has_graph or loss.requires_grad)
        if self._total is None or rows is None or rows == self._total:
            return loss  # the whole batch
        self.is_cut = True
        if self._is_given:
            assert self._rule is not None and self._rows is not None
            self._found.doubt(self._loss_fn, output, rows, self._target, self._rows, self._rule)
            self._is_given = False  # once per step is enough
        rule = self._rule or self._find(output, rows)
        if rule.combination == "sum":
            return loss
        self.counts += counted or 0.0
        if counted is None or not self._counted:  # of nothing, the mean is NaN, as uncut
            return loss * (rows / self._total)
        if counted == 0.0:
            # Zero, where 0 * NaN would be NaN; with the gradients, all zeros, that the loss would give.
            leaves = [x for x in given if x.requires_grad]
            zeros = [leaf.reshape(-1)[:0].sum().to(loss) for leaf in leaves]
            return torch.stack(zeros).sum() if zeros else torch.zeros_like(loss)
        return loss * (counted / self._counted)

    def _find(self, output: Any, rows: int) -> LossRule:
        assert self._rows is not None
        combination = self._found.find(self._loss_fn, output, rows, self._target, self._rows)
        self.combination = combination
        self._rule = LossRule(combination=combination or "mean")
        return self._rule

    @property
    def lacks_graph(self) -> bool:
        """Was it called, and is there nothing to go backward through?"""
        return self._has_graph is False

    def require_graph(self) -> None:
        """Raise ``PlacerError`` when there was nothing to go backward through, as eager would."""
        if self.lacks_graph:
            raise without_graph()

    def require_count(self, counts: float) -> None:
        """Raise ``PlacerError`` when ``counts``, of all slices, is not what is counted in the batch."""
        whole = self._counted
        if whole is not None and abs(counts - whole) > 1e-4 * max(abs(counts), whole):
            raise PlacerError(
                "normalizer",
                f"counts {counts:g} in the slices of the batch together and {whole:g} in the whole",
                "have it count something in the target, so that counts of parts add up",
            )
