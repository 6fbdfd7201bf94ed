"""Tensors in variables of the model's code: a program uses what is in them at each call."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch
from other_inputs import WAYS, Arguments, assert_equal_calls, compile_way
from torch import Tensor, nn

D = torch.float64
SCALE = torch.tensor(1.5, dtype=D)
FLAG = torch.tensor(False)
CONFIG = types.SimpleNamespace(scale=torch.tensor(1.5, dtype=D))
TABLE = {"rows": [torch.ones(8, dtype=D)]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * SCALE * TABLE["rows"][0]
        return self.last(x.tanh() if bool(FLAG) else x) * CONFIG.scale


class InClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = scaling(SCALE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x)))


def scaling(by: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def write() -> None:
    SCALE.add_(0.5)
    TABLE["rows"][0].mul_(1.1)


def assign() -> None:
    global SCALE
    SCALE = torch.tensor(SCALE.item() + 1, dtype=D)


def assign_in_containers() -> None:
    CONFIG.scale = CONFIG.scale + 0.25
    TABLE["rows"] = [TABLE["rows"][0] * 2]


def flip() -> None:
    FLAG.logical_not_()


def call() -> Arguments:
    return (torch.randn(4, 8, dtype=D),)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [write, assign, assign_in_containers, flip])
def test_the_present_values_are_used(change: Callable[[], None], way: str) -> None:
    assert_equal_calls(Net, [call] * 3, way, between=change)


def test_a_deep_copy_uses_the_variables_too() -> None:
    net = Net().double()
    placed = copy.deepcopy(compile_way(net, call(), "stages"))
    for change in (write, assign):
        (x,) = call()
        change()
        assert torch.allclose(placed(x), net(x))


def test_a_tensor_in_a_closure() -> None:
    assert_equal_calls(InClosure, [call] * 3, between=write)
