"""Forward may read how an input lies in memory: a placed model reads that of the present input."""

from __future__ import annotations

import copy

import pytest
import torch
from other_inputs import UNCUT, compile_way
from torch import Tensor, nn


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if x.is_contiguous() else y * 2


class Windows(Branches):
    def forward(self, x: Tensor) -> Tensor:
        row, column = x.stride()
        windows = x.as_strided((x.size(0), 3, 4), (row, 2 * column, column))
        y: Tensor = self.layer(windows.repeat(1, 1, 2))
        return y


@pytest.mark.matrix(4)
@pytest.mark.parametrize("way", UNCUT[:2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", [Branches, Windows])
def test_inputs_that_lie_otherwise_than_the_example(
    kind: type[Branches], transposed: bool, way: str
) -> None:
    plain = kind().double()
    inputs = [torch.randn(4, 8).double(), torch.randn(8, 4).double().T]
    placed = compile_way(copy.deepcopy(plain), (inputs[transposed],), way)
    for mode in (True, False):
        for x in inputs:
            found, expected = placed.train(mode)(x), plain.train(mode)(x)
            torch.testing.assert_close(found, expected)
