"""Small models, each with one feature that is easy to get wrong when a model is split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeywordModel(nn.Module):
    """Keyword arguments with defaults, a flag, and a dict of nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False
    ) -> dict[str, Any]:
        hidden = torch.tanh(self.embed(x))
        if scale is not None:
            hidden = hidden * scale
        if twice:
            hidden = self.mid(hidden)
        hidden = F.relu(self.mid(hidden))
        return {"logits": self.head(hidden), "states": (hidden, x.sum(1)), "rows": x.shape[0]}


class TiedTransformer(nn.Module):
    """A causal transformer whose embedding is its output layer's weight, with dropout."""

    def __init__(
        self, vocabulary: int = 17, width: int = 8, depth: int = 3, length: int = 6
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, length, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.norm(hidden))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.dropout(self.project(weights @ v))
        return x + self.mlp(self.norm2(x))


class InPlace(nn.Module):
    """In-place activations and additions, a view that is written to, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.shared = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.first(x)))
        z = self.shared(y)
        z += y
        z = self.relu(z)
        w = self.shared(z)
        view = w[:, :2]
        view.mul_(0.5)
        return self.last(w.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM (flattened weights, tuple results) between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 5)
        self.rnn = nn.LSTM(5, 4, num_layers=2, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sequence, (hidden, _) = self.rnn(self.inp(x))
        return self.out(sequence), hidden.transpose(0, 1)


class ConvNet(nn.Module):
    """A small classifier with dropout, of the kind that tutorials train on digits."""

    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout(p)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


class Pairs(nn.Module):
    """Compares every row with every other, as contrastive models that return logits do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h @ h.T


class Blocks(nn.Module):
    """Residual blocks of linear layers: many weights, or many activations, by width and rows."""

    def __init__(self, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]
