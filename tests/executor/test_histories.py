"""Lists that forward shortens, and attributes that it sets to what they are already, in every call."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

TWO = {"devices": ["cpu:0", "cpu:1"]}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: list[Tensor] = []
        self.held = {"kept": self.kept}


class Slices(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.kept.append(y.detach())
        self.kept = self.kept[-2:]
        return self.c(y)


class SlicesInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.held["kept"].append(y.detach().mean())
        self.held["kept"] = self.held["kept"][-2:]
        return self.c(y)


class Pops(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.kept.append(y.detach())
        if len(self.kept) > 2:
            self.kept.pop(0)
        return self.c(y)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("make", [Slices, SlicesInside, Pops])
def test_a_history_of_the_last_calls(make: type[Layers]) -> None:
    model = make()
    placed: Any = placer.compile(copy.deepcopy(model), TWO, torch.randn(4, 4))
    for _ in range(5):
        x = torch.randn(4, 4)
        torch.testing.assert_close(placed(x), model(x))
        torch.testing.assert_close([placed.kept, placed.held], [model.kept, model.held])


class Resets(Layers):
    """In train mode it forgets what it has kept in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: Tensor | None = None
        self.stopped = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.fused, self.stopped = None, False
            return self.c(self.a(x))
        if self.fused is None:
            self.fused = (self.c.weight @ self.a.weight).detach()
        return x @ self.fused.t()


def test_what_was_the_same_when_it_was_captured_is_set_all_the_same() -> None:
    model = Resets()
    placed: Any = placer.compile(copy.deepcopy(model), TWO, torch.randn(4, 4))
    for training in (True, False, True, False):
        x = torch.randn(4, 4)
        for each in (placed, model):
            each.train(training)
            each.stopped = True
            with torch.no_grad():
                each.a.weight.mul_(1.5)
        torch.testing.assert_close(placed(x), model(x))
        assert placed.stopped == model.stopped == (not training)
        torch.testing.assert_close(placed.fused, model.fused)


class Caches(Layers):
    @cached_property
    def scale(self) -> Tensor:
        return self.a.weight.detach().abs().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x)) * self.scale


def test_a_cached_property_is_computed_once() -> None:
    model = Caches()
    placed: Any = placer.compile(copy.deepcopy(model), TWO, torch.randn(4, 4))
    for _ in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(placed(x), model(x))
        for each in (placed, model):
            with torch.no_grad():
                each.a.weight.mul_(1.5)
