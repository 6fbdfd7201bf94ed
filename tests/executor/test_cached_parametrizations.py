"""Calls of a placed model inside ``torch.nn.utils.parametrize.cached()``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import placer

D = torch.float64
TWO: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"]}


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(D)
    return parametrizations.spectral_norm(model[0]) and model


def _call(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Two calls, whose weights are computed once, in train mode and then in another."""
    with parametrize.cached():
        found = [model(x), model(x * 2)]
        found[1].sum().backward()
        with torch.no_grad():
            found.append(model.eval()(x))
    model.train()
    return [*found, *(p.grad for p in model.parameters()), *model.buffers()]


def test_the_weights_are_computed_once() -> None:
    model, x = _model().eval(), torch.randn(6, 4, dtype=D)
    with parametrize.cached():
        placed = placer.compile(model, TWO, x)
        assert_close(placed(x), model(x), "result")
    placed.train()
    model.train()
    for _ in range(2):
        for ours, theirs in zip(_call(placed, x), _call(model, x), strict=True):
            assert_close(ours, theirs, "result")


def test_copies_are_refused() -> None:
    model, x = _model(), torch.randn(6, 4, dtype=D)
    placed = placer.compile(copy.deepcopy(model), TWO | {"replicas": 2}, x)
    with parametrize.cached(), pytest.raises(placer.PlacerError, match=r"0: replicas .* copies"):
        placed(x)
    assert_close(placed(x), model(x), "result")
