"""Modes, counters and wrappers: forward changes its modules, also where it is recomputed in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from oracle import assert_close
from other_inputs import (
    UNCUT,
    WAYS,
    Arguments,
    assert_equal_calls,
    assert_equal_state,
    compile_way,
)
from state_cases import ActNorm
from torch import Tensor, nn

import placer


def call() -> Arguments:
    return (torch.randn(4, 8, dtype=torch.float64),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()
        self.last = nn.Linear(8, 2)


class Twice(Net):
    """Its norm is called in three modes, and ends in another one than it began in."""

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        x = self.norm(self.first(x))
        self.norm.train()
        x = self.drop(self.norm(x))
        self.norm.eval()
        self.drop.train(not self.drop.training)
        return self.last(self.norm(x))


class Restores(Net):
    def forward(self, x: Tensor) -> Tensor:
        before = self.training
        self.eval()
        x = self.drop(self.norm(self.first(x)))
        self.train(before)
        return self.last(self.norm(x))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize("make", [Twice, Restores])
def test_modes(make: Callable[[], nn.Module], way: str) -> None:
    assert_equal_calls(make, [call] * 3, way)


def test_a_mode_that_the_caller_changes_before_backward() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    placed = compile_way(net, call(), "recomputed")
    (x,) = call()
    loss = placed(x).sum()
    placed.eval()
    loss.backward()
    net(x).sum().backward()
    assert torch.allclose(placed.get_parameter("0.weight").grad, net[0].weight.grad)
    assert not placed.training


CALLS: list[str] = []


class Counts(nn.Module):
    """It stays whole, and counts its calls in an attribute, in a list, and in a variable of its code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.seen = nn.Linear(8, 8), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(self.count)
        CALLS.append("called")
        return self.linear(x if x.sum() > 0 else -x) * self.count


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(8, 8), Counts(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside(self.first(x)))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", UNCUT)
def test_a_module_that_stays_whole_counts_once(way: str) -> None:
    CALLS.clear()
    placed = assert_equal_calls(Around, [call] * 3, way)
    assert len(CALLS) == 2 * 4  # four calls of two models
    notes = [str(note) for note in placed.plan.notes]
    assert any("inside is neither recomputed" in note for note in notes) == (way == "recomputed")


class Decays(nn.Module):
    """It stays whole, and assigns its weight's data between two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x if x.sum() > 0 else -x)
        self.linear.weight.data = 0.5 * self.linear.weight.data
        return self.linear(x)


class UsedLater(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(x), self[0].linear.weight)


class Force(Decays):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: self.linear(y).square().sum())(x)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize("kind", [Decays, Force])
def test_modules_that_assign_data_or_differentiate(kind: Any, way: str) -> None:
    assert_equal_calls(lambda: UsedLater(kind(), nn.Linear(8, 8)), [call] * 3, way)


def doubling(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapper(*args: Any) -> Tensor:
        return 2 * forward(*args)

    return wrapper


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_buffer", [False, True])
def test_steps_of_weights_that_the_first_batch_sets(way: str, *, in_buffer: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [
            ActNorm(8, in_buffer=in_buffer),
            nn.Linear(8, 8),
            nn.Tanh(),
            ActNorm(8, in_buffer=in_buffer),
        ]
        return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 2)).double()

    if way not in UNCUT:
        with pytest.raises(placer.CaptureError, match=r"it sets the parameter 1\.s"):
            compile_way(make(), call(), way)
        return
    plain, placed = make(), compile_way(make(), call(), way)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, placed)]
    for _ in range(3):
        (x,) = call()
        expected = plain(x).square().mean()
        expected.backward()
        assert_close(placed.step(x, loss_fn=lambda y: y.square().mean()), expected.detach(), "loss")
        assert_equal_state(placed, plain, "step")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert_close(placed.state_dict()[name], value, name)


class Doubling:
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


def method(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def double(layer: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * layer.weight, layer.bias)

    return MethodType(double, forward.__self__)  # type: ignore[attr-defined]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "wrap", [doubling, Doubling, method, lambda f: functools.partial(Doubling(f).__call__)]
)
def test_a_wrapped_forward_of_a_torch_layer_is_called(wrap: Any, way: str) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        for layer in (net[0], net[2]):
            layer.forward = wrap(layer.forward)
        return net

    assert_equal_calls(make, [call] * 3, way)
