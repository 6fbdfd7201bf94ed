"""Costs from a run of a few of a model's equal blocks are those of a run of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import ConvNeXt, VisionTransformer
from torchvision.models.convnext import CNBlockConfig

import placer.cost.expand
from placer.cost import CostTable
from placer.cost.estimate import CostEstimates
from placer.machine.devices import device_kind
from placer.program import Program, lower
from placer.program.blocks import find_repeats, shorten


class Layer(nn.Module):
    def __init__(self, width: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down, self.p = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), p

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        x = x + seen.transpose(1, 2).reshape(b, s, d)
        return x + nn.functional.dropout(self.down(self.up(x).relu()), self.p)


class Transformer(nn.Module):
    """Layers that all read a mask and a bias that is trained; ``kind`` says what else."""

    def __init__(self, kind: str = "", depth: int = 7) -> None:
        super().__init__()
        self.kind, self.bias = kind, nn.Parameter(torch.zeros(8, 8))
        layers = [Layer(p=0.1 + i / 100) for i in range(depth)]
        self.layers = nn.ModuleList([layers[0]] * depth if kind == "shared" else layers)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        mask, seen = self.bias + torch.ones(8, 8).tril().log(), []
        for layer in self.layers:
            x = layer(x, mask)
            if self.kind == "written":
                x.mul_(2.0)
            if self.kind == "grows":
                x = torch.cat((x, x[:, :0]), 1)
            seen.append(x)
        return (self.head(x), *seen) if self.kind == "states" else self.head(x)


class Grows(nn.Module):
    """Every step computes the same of more, in which no argument tells it."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.cat((x, x[:, -1:].sin()), 1) * 0.5
        return x


class Pieces(nn.Module):
    """The steps read pieces, in the middle larger ones."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split([1, 1, 1, 2, 4, 8, 4, 2, 1, 1, 1, 1], 1)
        total = x.sum(1, keepdim=True)
        for piece in pieces:
            total = (piece.sin() * piece).sum(1, keepdim=True) + total.exp()
        return total


class Scan(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 16) for _ in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for linear in self.inner:
            decay, drive = linear(x).sigmoid().chunk(2, -1)
            h, found = torch.zeros_like(drive[:, 0]), []
            for t in range(x.shape[1]):
                h = decay[:, t] * h + drive[:, t]
                found.append((h * x[:, t]).tanh())
            x = torch.stack(found, 1) + x
        return x, h


class Steps(nn.Module):
    """A random scan, whose steps share weights; some are read before and after it too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.linear, self.norm = seed, nn.Linear(8, 8), nn.LayerNorm(8)
        self.weight, self.scale = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.ones(8))
        self.own = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        choose = random.Random(self.seed)
        before, after, reads, *joins = (choose.random() < 0.5 for _ in range(4))
        mask, h, found = self.weight * 2, torch.zeros_like(x[:, 0]), []
        parts = choose.choices(range(9), k=choose.randint(2, 5))
        x = self.linear(x) @ self.weight if before else x
        previous = h
        for t in range(9):
            now = x[:, t] if reads else h
            for part in parts:
                steps: tuple[Callable[[Tensor], Tensor], ...] = (
                    self.linear,
                    self.norm,
                    lambda h: h @ self.weight,
                    lambda h: nn.functional.linear(h + 1, self.weight.t()),
                    lambda h, now=now: (h * self.scale + now).tanh(),
                    lambda h, t=t: self.own[t](h).relu(),
                    lambda h: h @ mask,
                    lambda h, now=now: h + self.linear(now),
                    lambda h, previous=previous: h.mul(2).add_(previous),
                )
                h = steps[part](h)
            previous = h.sigmoid()
            found.append(h)
        x = torch.stack(found, 1) if joins[0] else x * h.unsqueeze(1)
        return self.linear(x) * self.scale if after else x


class Residual(nn.Module):
    """Where all are one, gradients are added up both of the weight and of what the next reads twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + x.tanh())


class Convolutions(nn.Module):
    """Blocks with statistics and in-place activations, of which no two have the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i + 1, i + 2, 3), nn.BatchNorm2d(i + 2), nn.ReLU(inplace=True))
            for i in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residuals(nn.Module):
    """Equal blocks whose running statistics are written, and whose sums are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(16)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


def _vit() -> nn.Module:
    return VisionTransformer(32, 8, num_layers=7, num_heads=2, hidden_dim=16, mlp_dim=32)


def _convnext() -> nn.Module:
    settings = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 7)]
    return ConvNeXt(settings, stochastic_depth_prob=0.2, num_classes=5)


SEQUENCE, IMAGE = (2, 8, 16), (2, 3, 32, 32)
# model, shape of the input, and whether it has blocks of which one tells what the others cost
CASES: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "transformer": (Transformer, SEQUENCE, True),
    "hidden states": (lambda: Transformer("states"), SEQUENCE, True),
    "scan": (Scan, (2, 20, 8), True),
    "vit": (_vit, IMAGE, True),
    "convnext": (_convnext, IMAGE, True),
    "residuals": (Residuals, (2, 4, 8, 8), True),
    "shared weights": (lambda: Transformer("shared"), SEQUENCE, True),
    "one layer": (
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(8, 8), *[Residual()] * 20),
        (2, 8),
        False,
    ),
    "written in place": (lambda: Transformer("written"), SEQUENCE, True),
    "growing sequence": (Grows, (2, 4), False),
    "pieces": (Pieces, (2, 27), False),
    "convolutions": (Convolutions, (2, 1, 16, 16), False),
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"precision": "bf16", "kernels": "cuda", "offloads": True},
    {"kernels": "cpu"},
    {"training": False},
)


@pytest.fixture(scope="module", autouse=True)
def _attention_has_run() -> None:
    """torch makes 16 bytes more in a process's first backward of attention."""
    with torch.device("meta"):
        model, x = Transformer(depth=1), torch.empty(SEQUENCE)
    _costs(lower(model, (x,)), x, **OPTIONS[0])


def _costs(program: Program, x: Tensor, **options: Any) -> CostTable:
    return CostEstimates(program)([x], **options)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", CASES)
def test_costs_of_some_blocks_are_those_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, repeats = CASES[name]
    answers = _compare(build, shape, OPTIONS, monkeypatch)
    assert (bool(answers) and all(answers)) == repeats


def test_costs_of_some_steps_of_a_scan_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        answer
        for seed in range(6)
        for answer in _compare(partial(Steps, seed), (2, 9, 8), OPTIONS[1:2], monkeypatch)
    ]
    assert sum(answers) > len(answers) / 2


def _compare(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    options: Sequence[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> list[bool]:
    """Whether a run of some blocks told the costs, for each of ``options``; if so, they are right."""
    with torch.device("meta"):
        model, x = build(), torch.empty(shape)
    program = lower(model, (x,))
    answers: list[bool] = []
    expand = placer.cost.expand.expand
    monkeypatch.setattr(
        "placer.cost.estimate.expand",
        lambda *args: (answers.append((found := expand(*args)) is not None), found)[1],
    )
    monkeypatch.setattr("placer.cost.estimate.shorten", shorten)
    some = [_costs(program, x, **each) for each in options]
    monkeypatch.setattr("placer.cost.estimate.shorten", lambda _: None)
    for each, found in zip(options, some, strict=True):
        whole = _costs(program, x, **each)
        for field in fields(CostTable):
            if field.name != "work":
                assert getattr(found, field.name) == getattr(whole, field.name), field.name
        kind = device_kind("cuda:0", "a100")
        for way in ("forward", "backward"):
            ours, theirs = (getattr(t.work.seconds(kind), way) for t in (found, whole))
            np.testing.assert_allclose(ours.device, theirs.device, rtol=1e-12)
            np.testing.assert_allclose(ours.host, theirs.host, rtol=1e-12)
    return answers


def test_the_longest_repeats_are_found() -> None:
    with torch.device("meta"):
        model, x = Transformer(), torch.empty(SEQUENCE)
    program = lower(model, (x,))
    (repeat,) = find_repeats(program)
    per_layer = sum(layer.startswith("layers.3") for layer in program.layers.values())
    assert repeat.period == per_layer
    assert repeat.count == 6
