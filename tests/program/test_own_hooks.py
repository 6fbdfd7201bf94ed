"""Hooks that a model puts on its own layers are part of its forward, and recorded like it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_inputs import UNCUT, compile_way
from torch import Tensor, nn

import placer


class Net(nn.Module):
    """Collects what two layers return, by hooks that its constructor registers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.kept: list[Tensor] = []
        hooks: dict[str, Callable[..., Any]] = {
            "function": lambda module, args, output: self.kept.append(output),
            "method": self.keep,
            "partial": functools.partial(self.keep),
        }
        layers = self.first, self.second
        self.handles = [layer.register_forward_hook(hooks[kind]) for layer in layers]

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output)


class Clears(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.clear()
        return self.last(self.second(self.first(x))), self.kept[0]


class ClearsLater(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.last(self.second(self.first(x)))
        total = self.kept[0] + self.kept[1]
        self.kept.clear()
        return y, total


class Replaces(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        y: Tensor = self.last(self.second(self.first(x)))
        return y


class Pops(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.second(self.first(x))), self.kept.pop()


class Appends(Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.second(self.first(x)))
        self.kept.append(y)
        return y


@pytest.mark.matrix(4)
@pytest.mark.parametrize("way", UNCUT[:2])
@pytest.mark.parametrize("hook", ["function", "method", "partial"])
@pytest.mark.parametrize("kind", [Clears, ClearsLater, Replaces, Pops, Appends])
def test_what_they_collect_is_what_the_plain_model_collects(
    kind: type[Net], hook: str, way: str
) -> None:
    plain, model = kind(hook), kind(hook)
    model.load_state_dict(plain.state_dict())
    placed: Any = compile_way(model, (torch.randn(3, 4),), way)
    for _ in range(3):
        x = torch.randn(5, 4)
        for found, expected in zip(placed(x), plain(x), strict=True):
            torch.testing.assert_close(found, expected)
        assert len(placed.kept) == len(plain.kept)
        for found, expected in zip(placed.kept, plain.kept, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("hook", ["function", "method"])
def test_one_that_is_removed_from_a_layer_runs_no_more(hook: str) -> None:
    model: Any = Clears(hook)
    model.first.register_forward_hook(model.keep)
    x = torch.randn(3, 4)
    placed: Any = placer.compile(model, {"devices": ["cpu:0"]}, x)
    placed(x)
    assert len(placed.kept) == 3
    placed.handles[1].remove()
    placed(x)
    assert len(placed.kept) == 2


class Steered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4))
        self.last = nn.Linear(4, 2)

    def steer(self, layer: str, strength: float) -> Any:
        return self.get_submodule(layer).register_forward_hook(lambda m, args, y: y * strength)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y


@pytest.mark.parametrize("layer", ["first", "first.0", "last"])
@pytest.mark.parametrize("spec", [{}, {"microbatches": 2}])
def test_another_one_in_the_place_of_one_that_was_removed(spec: Any, layer: str) -> None:
    model, x = Steered().double(), torch.randn(6, 4, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(model), {"devices": ["cpu:0"], **spec}, x)
    for strength in (2.0, 3.0, 2.0):
        handles = [each.steer(layer, strength) for each in (model, placed)]
        torch.testing.assert_close(copy.deepcopy(placed)(x), model(x))
        torch.testing.assert_close(placed(x), model(x))
        for handle in handles:
            handle.remove()
