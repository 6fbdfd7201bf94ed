"""What goes into ``forward`` and what comes out of it, in the forms that people use."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from oracle import assert_close, assert_same
from torch import Tensor, nn

import placer

D = torch.float64
TWO = {"devices": ["cpu:0", "cpu:1"]}


class Cache:
    """A class that pytree does not know, as transformers' caches are."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []
        self.length = 0
        self.device: torch.device | None = None

    def update(self, keys: Tensor, values: Tensor) -> None:
        self.layers.append({"keys": keys, "values": values})
        self.length += keys.shape[1]
        self.device = keys.device


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, use_cache: bool = True) -> dict[str, Any]:
        cache = Cache()
        for layer in (self.a, self.b):
            keys = layer(x)
            cache.update(keys, x)
            x = torch.tanh(keys)
        return {"out": self.c(x), "cache": cache if use_cache else None}


def test_an_object_with_tensors_is_returned_whole() -> None:
    model = Caching().double()
    x = torch.randn(6, 3, 4, dtype=D)
    for fields in ({}, {"microbatches": 2}, {"replicas": 2}):
        placed = placer.compile(model, TWO | fields, x)
        cuts = max([1, *fields.values()])
        found, expected = placed(x), model(x)
        assert_close(found["out"], expected["out"], "out")
        assert isinstance(found["cache"], Cache)
        assert found["cache"].device == x.device
        assert found["cache"].length == expected["cache"].length, cuts
        for ours, theirs in zip(found["cache"].layers, expected["cache"].layers, strict=True):
            for name in ("keys", "values"):
                assert_close(ours[name], theirs[name], name)
        found["cache"].layers[1]["keys"].sum().backward()
        assert placed.a.weight.grad is not None
        longer = torch.randn(4, 5, 4, dtype=D)
        assert placed(longer)["cache"].length == 10
        placed.step(x, loss_fn=lambda output: output["out"].sum())
    assert_same(model, TWO, (x,), {"use_cache": False})


def keyword_only(forward: Any) -> Any:
    """A decorator that adds a keyword, as transformers has them."""

    @functools.wraps(forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{"scale": 3.0} | kwargs)

    return wrapped


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    @keyword_only
    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.a(x) * scale
        return self.b(x if shift is None else x + shift)


def test_keywords_stay_keywords_and_defaults_are_left_out() -> None:
    x, shift = torch.randn(4, 4, dtype=D), torch.randn(4, 4, dtype=D)
    assert_same(Decorated().double(), TWO, (x,))
    assert_same(Decorated().double(), TWO, (x,), {"shift": shift})
    assert_same(Decorated().double(), TWO, (x, shift), {"scale": 2.0})


class NumpyNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) / np.sqrt(4)
        return self.b(x * np.float32(0.5)).sum(np.int64(1), keepdim=True)


def test_numbers_of_numpy() -> None:
    assert_same(NumpyNumbers().double(), TWO, (torch.randn(4, 4, dtype=D),))
