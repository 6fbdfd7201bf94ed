"""What a recording does beside running the model: it is run often, and models are large."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program import lower
from placer.program.fake.mode import FakeMode
from placer.program.objects.copying import Held


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() + x


class Flips(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if random.random() < 0.5 else -x)


class FlipsOnce(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.drawn is None:
            self.drawn = random.random()
        return super().forward(x)


def test_random_generators_are_not_looked_at_around_every_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, get_state = [], np.random.get_state

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return get_state(*args, **kwargs)

    monkeypatch.setattr(np.random, "get_state", counted)
    counts = []
    for depth in (2, 12):
        found.clear()
        lower(nn.Sequential(*[Block() for _ in range(depth)]), (torch.randn(2, 4),))
        counts.append(len(found))
    assert counts[0] == counts[1]


def test_the_module_that_draws_is_found_all_the_same() -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block(), Flips()), Block())
    found = lower(model, (torch.randn(2, 4),)).captured.whole_modules
    assert [module.layer for module in found] == ["1.1"]
    assert "random numbers" in found[0].reason
    assert found[0].location.startswith(__file__)


def test_a_module_that_draws_in_its_first_call_is_found() -> None:
    model = nn.Sequential(Block(), FlipsOnce())
    found = lower(model, (torch.randn(2, 4),)).captured.whole_modules
    assert [module.layer for module in found] == ["1"]
    assert model[1].drawn is None


def test_compile_runs_a_model_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, recorded with twice the batch, run as a graph, and run for its costs; one backward."""
    ran: Counter[str] = Counter()
    run = FakeMode._run

    def counted(mode: Any, func: Any, *others: Any) -> Any:
        ran[str(func)] += 1
        return run(mode, func, *others)

    monkeypatch.setattr(FakeMode, "_run", counted)
    model = nn.Sequential(*[Block() for _ in range(6)])
    placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, torch.randn(2, 4))
    assert (ran["aten.tanh.default"], ran["aten.tanh_backward.default"]) == (4 * 6, 6)


def test_every_tensor_of_a_model_of_many_modules_is_found() -> None:
    """Each module has two dozen tables, so these are more objects than are searched in attributes."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4_000)))
    assert len(Held.by(model).tensors) == 8_000
