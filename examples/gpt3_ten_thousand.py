"""GPT-3 on 10,000 GPUs: how would it be trained the fastest, and how long does a step take?

Nothing is allocated and no GPU is needed: the model is on the meta device, and the machine is a description
that placer has. Prints the answer, and why each other way lost.

    python examples/gpt3_ten_thousand.py
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from placer.plan.types import Plan
from placer.report import plan_table


class Block(nn.Module):
    """Causal attention and an MLP, each with a normalization before it and a residual around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder; the defaults are GPT-3's 175 billion parameters (Brown et al. 2020, table 2.1)."""

    def __init__(
        self, blocks: int = 96, width: int = 12288, heads: int = 96, words: int = 50257
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(2048, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def answer(blocks: int = 96, sequences: int = 6144, nodes: int = 1250) -> Plan:
    """The plan for a step with so many sequences of 2,048 tokens on nodes of eight A100, in bfloat16."""
    with torch.device("meta"):
        model = GPT(blocks)
        tokens = torch.empty(sequences, 2048, dtype=torch.long)
    return placer.auto_plan(
        model, tokens, machine=f"dgx-a100:{nodes}", precision="bf16", processes=True
    )


def main() -> None:
    Console().print(plan_table(answer()))


if __name__ == "__main__":
    main()
