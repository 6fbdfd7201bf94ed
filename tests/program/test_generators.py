"""Generators of random numbers of Python and numpy, in attributes and variables, draw as without placer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer

SHARED = np.random.default_rng(3)


class Noisy(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(4, 4), [generator]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(self.held[0].uniform(0.5, 2.0))


class NoisyByVariable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(SHARED.uniform(0.5, 2.0))


MAKE: dict[str, Callable[[], nn.Module]] = {
    "Random": lambda: Noisy(random.Random(3)),
    "Generator": lambda: Noisy(np.random.default_rng(3)),
    "RandomState": lambda: Noisy(np.random.RandomState(3)),
    "variable": NoisyByVariable,
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", MAKE)
def test_every_call_draws_the_next_number(name: str, *, inside: bool) -> None:
    model, x = MAKE[name](), torch.randn(4, 4)
    if inside:
        model = nn.Sequential(nn.Linear(4, 4), model, nn.Linear(4, 4))
    twin, state = copy.deepcopy(model), SHARED.bit_generator.state
    expected = [model(x) for _ in range(3)]
    SHARED.bit_generator.state = state
    spec = {"devices": [{"name": f"cuda:{i}", "memory": "16GiB"} for i in range(2)]}
    placed = placer.compile(twin, spec, x, run_on="cpu")
    torch.testing.assert_close([placed(x) for _ in range(3)], expected)
