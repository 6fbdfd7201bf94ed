"""Tensors with a row per sample that forward keeps for its next call, as a recurrent layer's state."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import placer

TWO = {"devices": ["cpu:0", "cpu:1"]}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: Any = None


class KeepsState(Layers):
    """A recurrent layer's state, which is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        kept = None if self.kept is None else tuple(x.detach() for x in self.kept)
        y, self.kept = self.rnn(self.a(x).unsqueeze(1), kept)
        return self.c(y.squeeze(1))


class Pair(NamedTuple):
    sum: Tensor
    last: Tensor


class KeepsPair(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.kept is not None:
            y = y + self.kept.sum.detach() + self.kept.last.detach()
        self.kept = Pair(y * 2, y)
        return self.c(y)


class ReadsSome(Layers):
    """It reads as many rows as it has now, of those that it had."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.kept is not None:
            y = y + self.kept.detach()[: x.size(0)]
        self.kept = y
        return self.c(y)


KINDS = [KeepsState, KeepsPair, ReadsSome]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("make", KINDS)
def test_the_next_call_reads_them(make: type[nn.Module]) -> None:
    model = make()
    placed = placer.compile(copy.deepcopy(model), TWO, torch.randn(4, 4))
    for _ in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(placed(x), model(x))


@pytest.mark.parametrize("slices", [{"microbatches": 2}, {"replicas": 2}])
@pytest.mark.parametrize("make", KINDS)
def test_slices_cannot(make: type[nn.Module], slices: dict[str, int]) -> None:
    placed = placer.compile(make(), {**TWO, **slices}, torch.randn(4, 4))
    placed(torch.randn(4, 4))
    with pytest.raises(placer.CaptureError, match="is kept from one call to the next with a row"):
        placed(torch.randn(4, 4))
