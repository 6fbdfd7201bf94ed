"""Models whose number of layers gives a graph of a wanted number of nodes; build them on ``meta``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.resnet import Bottleneck, ResNet

_WIDTH, _HEADS = 768, 12  # of GPT-2
_WORDS = 1_000  # a head over all 50,257 would be the largest load of any placement


class Block(nn.Module):
    """A GPT-2 block written with functions, so that its graph is fine-grained."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part.reshape(rows, length, _HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, _WIDTH))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Embedding, ``depth`` blocks, norm, head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def _convolutions(first: int, width: int, depth: int) -> nn.Sequential:
    layers = []
    for i in range(depth):
        layers += [
            nn.Conv2d(first if not i else width, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels with ``depth`` convolutions on either side, a skip at each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        pairs = list(zip((3, *widths), widths, strict=False))
        self.encoder = nn.ModuleList(_convolutions(a, b, depth) for a, b in pairs)
        self.decoder = nn.ModuleList(
            _convolutions(a + b, a, depth) for a, b in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, encode in enumerate(self.encoder):
            x = encode(functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for decode, skip in reversed(list(zip(self.decoder, skips[:-1], strict=True))):
            x = decode(torch.cat([skip, functional.interpolate(x, scale_factor=2.0)], 1))
        return x


def deep_model(graph: str, num_nodes: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its inputs; ``graph`` is ``"GPT"``, ``"ResNet"`` or ``"U-Net"``."""
    if graph == "GPT":
        depth = max(1, num_nodes // 24)  # nodes of a block
        return GPT(depth), (torch.zeros(1, 128, dtype=torch.long),)
    image = torch.zeros(1, 3, 64, 64)
    if graph == "ResNet":
        blocks = max(4, num_nodes // 10)
        return ResNet(Bottleneck, [blocks // 4] * 4), (image,)
    return UNet(max(1, num_nodes // 21)), (image,)  # seven stacks of three nodes a convolution
