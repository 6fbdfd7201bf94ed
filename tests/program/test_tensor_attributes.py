"""Attributes that users set on parameters, buffers and inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from kinds import KINDS
from oracle import assert_close
from torch import Tensor, nn

import placer

D = torch.float64
X = torch.randn(6, 4, dtype=D)
TWO: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"]}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.a.weight.scale = 2.0
        self.register_buffer("mask", torch.ones(4))
        self.mask.kind = "causal"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.a.weight.scale)
        return y + x if getattr(x, "is_residual", False) else y


def test_the_placed_parameters_and_buffers_have_them() -> None:
    placed = placer.compile(Scaled(), TWO, X)
    assert placed.a.weight.scale == 2.0
    assert placed.mask.kind == "causal"


@pytest.mark.parametrize("more", [{}, {"replicas": 2, "microbatches": 2}], ids=str)
def test_one_that_changes_is_followed(more: dict[str, Any]) -> None:
    model = Scaled()
    placed = placer.compile(model, TWO | more, X)
    for scale in (2.0, 3.0):
        model.a.weight.scale = placed.a.weight.scale = scale
        assert_close(placed(X), model(X), "output")


class Shifted(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.b.bias.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b.bias.shift


def test_a_tensor_that_is_replaced_is_followed() -> None:
    model = Shifted()
    placed = placer.compile(model, TWO, X)
    for shift in (torch.zeros(4), torch.full((4,), 3.0)):
        model.b.bias.shift = placed.b.bias.shift = shift
        assert_close(placed(X), model(X), "output")


class Sets(Scaled):
    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.a.weight.seen, self.table, self.change = [], torch.ones(4), change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().forward(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: vars(net.a.weight).update(scale=3.0),
        lambda net: setattr(net.table, "t" + "ag", 1),
        lambda net: net.a.weight.seen.append(1),
    ],
)
def test_one_that_forward_changes_is_refused(change: Callable[[Any], object]) -> None:
    with pytest.raises(placer.CaptureError, match=r"sets the attribute '(scale|tag|seen)' on a"):
        placer.compile(Sets(change), TWO, X)


def test_one_of_an_input_is_refused_if_forward_reads_it() -> None:
    model, x = Scaled(), X.clone()
    x.is_residual = True
    with pytest.raises(placer.CaptureError, match="x: has an attribute 'is_residual'"):
        placer.compile(model, TWO, x)
    x = X.clone()
    x.name_of_file = "one.png"
    assert_close(placer.compile(model, TWO, x)(x), model(X), "output")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("seed", range(4))
def test_verify_compares_them(seed: int) -> None:
    case = KINDS["tensor_attributes"](Random(seed))
    found = placer.verify(case.model, TWO, copy.deepcopy(case.example(6)))
    assert found.ok, found


class Asks(nn.Module):
    """What it asks for, no tensor has when it is placed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=D), nn.Linear(4, 4, dtype=D)
        self.b.register_buffer("mask", torch.ones(4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * getattr(self.a.weight, "late", 2.0)
        if any(hasattr(parameter, "frozen") for parameter in self.b.parameters()):
            y = y.detach()
        try:
            y = y + self.b.mask.shift
        except AttributeError:
            y = y - 1
        return self.b(y) * getattr(x, "weight", 1.0)


@pytest.mark.parametrize("more", [{}, {"replicas": 2, "microbatches": 2}], ids=str)
def test_a_new_one_is_followed(more: dict[str, Any]) -> None:
    model = Asks()
    placed = placer.compile(model, TWO | more, X)
    for late in (3.0, 4.0, None):
        for net in (model, placed):
            if late is None:
                del net.a.weight.late, net.b.weight.frozen, net.b.mask.shift
            else:
                net.a.weight.late, net.b.weight.frozen = late, True
                net.b.mask.shift = torch.full((4,), late, dtype=D)
        found, expected = placed(X), model(X)
        assert_close(found, expected, "output")
        for net, result in ((placed, found), (model, expected)):
            net.zero_grad()
            result.sum().backward()
        assert_close(placed.a.weight.grad, model.a.weight.grad, "gradient")


def test_a_new_one_of_an_input_is_refused() -> None:
    placed, x = placer.compile(Asks(), TWO, X), X.clone()
    x.weight = 2.0
    with pytest.raises(placer.CaptureError, match="x: has an attribute 'weight'"):
        placed(x)
