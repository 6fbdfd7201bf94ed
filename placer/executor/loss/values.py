"""The values in a target that may make a loss count its rows differently: labels, masks, NaN, zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MOST_LABELS = 256  # one by one; of more only a new least or largest label is looked at
_WIDEST_RANGE = 2**20  # of labels that are counted in a table

Number = int | float


@dataclass(slots=True)
class SeenValues:
    """What one tensor of the targets has held so far; what is new in the next is asked of `news`.

    Of integers it is every value up to 256 of them, of floating-point numbers the least and the
    largest, and whether there were zeros or NaNs.
    """

    labels: set[int] = field(default_factory=set)
    low: Number | None = None
    high: Number | None = None
    special: set[str] = field(default_factory=set)  # of floating-point numbers: "zero", "nan"

    def news(self, target: Tensor) -> list[Number]:
        """The values of ``target`` to try the loss with, none where it brings nothing new."""
        target = target.detach()
        if not target.numel() or target.is_complex():
            return []
        if target.is_floating_point():
            return self._new_numbers(target)
        return self._new_labels(target.to(torch.int64))

    def add(self, news: Sequence[Number]) -> None:
        """Keep what ``news`` said."""
        for value in news:
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
        news = {low, high} - self.labels
        if len(self.labels) < _MOST_LABELS and high - low < _WIDEST_RANGE:
            counts = torch.bincount((target - low).flatten())
            news |= set((counts.nonzero().flatten() + low).tolist()) - self.labels
        inside = sorted(news)
        if len(inside) > _MOST_LABELS:  # the extremes, and those between at even steps
            step = len(inside) / _MOST_LABELS
            inside = [*(inside[int(i * step)] for i in range(_MOST_LABELS)), inside[-1]]
        if len(self.labels) >= _MOST_LABELS:
            assert self.low is not None and self.high is not None
            inside = [value for value in inside if not self.low <= value <= self.high]
        return list(inside)

    def _new_numbers(self, target: Tensor) -> list[Number]:
        low, high = torch.stack(target.aminmax()).tolist()
        news: list[Number] = []
        if low != low:
            if "nan" not in self.special:
                news.append(low)
            target = target[~target.isnan()]
            if not target.numel():
                return news
            low, high = torch.stack(target.aminmax()).tolist()
        if self.low is None or low < self.low:
            news.append(low)
        if self.high is None or high > self.high:
            news.append(high)
        if "zero" not in self.special and bool((target == 0).any()):
            news.append(0.0)
        return news
