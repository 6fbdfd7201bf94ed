"""What holds for the example by chance is no rule: its batch size, equal shapes of weights, flags."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn

import placer

SPEC = {"devices": ["cpu:0", "cpu:1"]}
SLICES = [{"microbatches": 2}, {"replicas": 2}]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.settings = Settings()


@dataclass(slots=True)
class Settings:
    scale: float = 1.0
    shift: Tensor | None = None
    calls: int = 0


class OtherForFour(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(self.b(2 * y if x.size(0) == 4 else y))


class OtherForFew(Layers):
    """Of the example and of twice as many rows it computes the same, but not of a slice."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.c(self.b(2 * y if x.size(0) < 3 else y))


class FreezesForFour(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.b.bias.requires_grad = x.size(0) != 4
        return self.c(self.b(self.a(x)))


class SameOperators(Layers):
    """Both branches run the same operators on weights of the same shapes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y) if y[0, 0].item() > 0 else self.c(y)


def _train(model: Any, x: Tensor) -> dict[str, Any]:
    for parameter in model.parameters():
        parameter.grad = None
    output = model(x)
    output.square().sum().backward()
    found: dict[str, Any] = {"output": output.detach()}
    for name, parameter in model.named_parameters():
        found |= {f"flag of {name}": parameter.requires_grad, f"gradient of {name}": parameter.grad}
    return found


def _assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert_close(found[name], value, name)
        else:
            assert found[name] is value, name


def _pair(kind: Callable[[], nn.Module], spec: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind().double()
    placed = placer.compile(copy.deepcopy(model), spec, _batch(4), run_on="cpu")
    return model, placed


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", [OtherForFour, OtherForFew, FreezesForFour, SameOperators])
def test_what_slices_would_compute_differently_is_refused(kind: Callable[[], nn.Module]) -> None:
    model, placed = _pair(kind, SPEC)
    for rows in (4, 2, 4, 6):
        x = _batch(rows)
        _assert_equal(_train(placed, x), _train(model, x))
    for slices in SLICES:
        with pytest.raises(placer.CaptureError, match="so a slice of the batch does not compute"):
            placer.compile(kind().double(), {**SPEC, **slices}, _batch(4))(_batch(4))


class SetsFlags(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.requires_grad_(self.training)
        if not self.training:
            self.c.requires_grad_(requires_grad=False)
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize("slices", [{}, *SLICES])
def test_flags_that_forward_sets_in_one_mode_only(slices: dict[str, int]) -> None:
    model, placed = _pair(SetsFlags, {**SPEC, **slices})
    for training in (True, False, True, False, False, True):
        x = _batch(4)
        _assert_equal(_train(placed.train(training), x), _train(model.train(training), x))


class ReadsSlots(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x)) * self.settings.scale
        return self.c(y if self.settings.shift is None else y + self.settings.shift)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("slices", [{}, *SLICES])
def test_settings_in_an_object_with_slots_that_change(slices: dict[str, int]) -> None:
    model, placed = _pair(ReadsSlots, {**SPEC, **slices})
    for scale, shift in ((1.0, None), (3.0, None), (3.0, 1.0), (2.0, 5.0)):
        x = _batch(4)
        for each in (model, placed):
            each.settings.scale = scale
            each.settings.shift = None if shift is None else torch.full((4,), shift).double()
        _assert_equal(_train(placed, x), _train(model, x))


class WritesSlots(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.settings.calls += 1
        self.settings.shift = y.detach()
        return y


class WritesSlotsInside(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.inside = WritesSlots()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.inside(self.b(x)))


SHARED = Settings()


class WritesGlobalSlots(Layers):
    def forward(self, x: Tensor) -> Tensor:
        SHARED.shift = x
        return self.a(x)


def test_what_forward_stores_in_an_object_with_slots_is_there() -> None:
    model, placed = _pair(WritesSlotsInside, SPEC)
    for calls in (1, 2, 3):
        x = _batch(4)
        _assert_equal(_train(placed, x), _train(model, x))
        assert placed.inside.settings.calls == model.inside.settings.calls == calls
        assert_close(placed.inside.settings.shift, model.inside.settings.shift, "stored")


@pytest.mark.parametrize("kind", [WritesSlots, WritesGlobalSlots])
def test_or_refused_if_the_model_itself_does(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(placer.CaptureError, match="an object that has __slots__"):
        placer.compile(kind(), SPEC, torch.randn(4, 4))
    assert SHARED.shift is None


class FreezesForAWhile(Layers):
    """As a GAN does with its discriminator."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.b.requires_grad_(False)
        y = self.b(y)
        self.b.requires_grad_(True)
        return self.c(y)


def test_flags_that_forward_sets_for_a_while_need_the_layers_own_weights() -> None:
    for slices in ({}, {"microbatches": 2}):
        model, placed = _pair(FreezesForAWhile, {**SPEC, **slices})
        x = _batch(4)
        _assert_equal(_train(placed, x), _train(model, x))
    with pytest.raises(placer.CaptureError, match="which replicas with copies of it cannot do"):
        placer.compile(FreezesForAWhile(), {**SPEC, "replicas": 2}, torch.randn(4, 4))
