"""Values in a target for which a loss may weight rows differently: labels, masks, NaN and zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MAX_LABELS = 256  # tracked one by one; beyond that only a new least or largest label is new
_MAX_RANGE = 2**20  # of labels, for ``torch.bincount``

Number = int | float


@dataclass(slots=True)
class SeenValues:
    """The values that one tensor of the target has had so far.

    For integers these are up to 256 values; for floating-point numbers the least and the largest value,
    and whether there were zeros or NaNs.
    """

    labels: set[int] = field(default_factory=set)
    low: Number | None = None
    high: Number | None = None
    special: set[str] = field(default_factory=set)  # "zero" and "nan", among floating-point numbers

    def new_values(self, target: Tensor) -> list[Number]:
        """The values of ``target`` that it has not had before, with which to try the loss."""
        target = target.detach()
        if not target.numel() or target.is_complex():
            return []
        if target.is_floating_point():
            return self._new_numbers(target)
        return self._new_labels(target.to(torch.int64))

    def add(self, new_values: Sequence[Number]) -> None:
        """Add what `new_values` returned."""
        for value in new_values:
            if value != value:
                self.special.add("nan")
                continue
            if isinstance(value, int):
                self.labels.add(value)
            elif value == 0:
                self.special.add("zero")
            self.low = value if self.low is None else min(self.low, value)
            self.high = value if self.high is None else max(self.high, value)

    def _new_labels(self, target: Tensor) -> list[Number]:
        low, high = (int(x) for x in torch.stack(target.aminmax()).tolist())
        new_values = {low, high} - self.labels
        if len(self.labels) < _MAX_LABELS and high - low < _MAX_RANGE:
            counts = torch.bincount((target - low).flatten())
            new_values |= set((counts.nonzero().flatten() + low).tolist()) - self.labels
        inside = sorted(new_values)
        if len(inside) > _MAX_LABELS:  # the least, the largest, and some between at even steps
            step = len(inside) / _MAX_LABELS
            inside = [*(inside[int(i * step)] for i in range(_MAX_LABELS)), inside[-1]]
        if len(self.labels) >= _MAX_LABELS:
            assert self.low is not None and self.high is not None
            inside = [value for value in inside if not self.low <= value <= self.high]
        return list(inside)

    def _new_numbers(self, target: Tensor) -> list[Number]:
        low, high = torch.stack(target.aminmax()).tolist()
        new_values: list[Number] = []
        if low != low:
            if "nan" not in self.special:
                new_values.append(low)
            target = target[~target.isnan()]
            if not target.numel():
                return new_values
            low, high = torch.stack(target.aminmax()).tolist()
        if self.low is None or low < self.low:
            new_values.append(low)
        if self.high is None or high > self.high:
            new_values.append(high)
        if "zero" not in self.special and bool((target == 0).any()):
            new_values.append(0.0)
        return new_values
