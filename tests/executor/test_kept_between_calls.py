"""Plain attributes that forward sets and reads again in the next call."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.executor import program_cache as programs


class Base(nn.Module):
    """``middle`` between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.prepare()

    def prepare(self) -> None:
        """Set the first values of what ``middle`` keeps."""

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Last(Base):
    def middle(self, x: Tensor) -> Tensor:
        self.kept = x.detach()
        return x


class Cache(Base):
    kept: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.dtype != x.dtype:
            self.kept = torch.arange(4, dtype=x.dtype) * 2
        return x + self.kept


class Counter(Base):
    kept = 0

    def prepare(self) -> None:
        self.kept = 0

    def middle(self, x: Tensor) -> Tensor:
        self.kept += 1
        return x * self.kept


class CounterInDict(Base):
    def prepare(self) -> None:
        self.kept: Any = {"calls": 0}

    def middle(self, x: Tensor) -> Tensor:
        self.kept["calls"] += 1
        return x * self.kept["calls"]


class Average(Base):
    def prepare(self) -> None:
        self.kept = torch.zeros(4, dtype=torch.float64)

    def middle(self, x: Tensor) -> Tensor:
        self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)
        return x - self.kept


class History(Base):
    def prepare(self) -> None:
        self.kept: list[Tensor] = []

    def middle(self, x: Tensor) -> Tensor:
        self.kept.append(x.detach().amax(1))
        return x


class Recent(Base):
    def prepare(self) -> None:
        self.kept: deque[Tensor] = deque(maxlen=3)

    def middle(self, x: Tensor) -> Tensor:
        self.kept.append(x.detach().amax(1))
        return x


class Annealed(Base):
    def prepare(self) -> None:
        self.kept = 1.0

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = self.kept * 0.9
        return x / self.kept


MODELS = [Last, Cache, Counter, CounterInDict, Average, History, Recent, Annealed]
LAYERS = {"first": "cuda:0", "last": "cuda:1"}
STAGES = {"devices": ["cuda:0", "cuda:1"], "layers": LAYERS}
REPLICAS = {**STAGES, "devices": [f"cuda:{i}" for i in range(4)], "replicas": 2}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("spec", [STAGES, REPLICAS], ids=["stages", "replicas"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_a_call_keeps_is_what_the_next_call_reads(
    kind: type[Base], spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = kind().double()
    mine, x = copy.deepcopy(plain), torch.randn(6, 4, dtype=torch.float64)
    try:
        placed = placer.compile(mine, spec, x, run_on="cpu")
    except placer.CaptureError as error:
        assert kind is Average, error
        assert spec is REPLICAS, error
        return
    captures: list[int] = []
    capture = programs.lower
    monkeypatch.setattr(
        programs, "lower", lambda *a, **k: (captures.append(1), capture(*a, **k))[1]
    )
    for number in range(6):
        inputs, found = torch.randn(6, 4, dtype=torch.float64), []
        for model in (placed, plain):
            out = model.train(number != 3)(inputs)
            out.square().mean().backward()
            found.append([out, list(model.kept) if isinstance(model.kept, deque) else model.kept])
        torch.testing.assert_close(*found, msg=lambda text, n=number: f"call {n}: {text}")
    for (name, a), b in zip(placed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    assert len(captures) <= 2  # one for each mode
