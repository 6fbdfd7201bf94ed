"""A backward in two halves, for inputs and for weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from placer.executor.split_backward import SplitBackward


class _Counted(nn.Module):
    """A residual block that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def test_each_half_recomputes_a_region_once() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(_Counted() for _ in range(3)).double()
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)

    def forward() -> tuple[Tensor, Tensor]:
        received = y = x * 1
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False)
        return received, y.square().sum()

    forward()[1].backward()
    expected = [p.grad for p in (x, *blocks.parameters())]
    blocks.zero_grad()
    received, loss = forward()
    delivered: list[Tensor] = []
    split = SplitBackward([loss], [None], [(get_gradient_edge(received), delivered.append)])
    before = [block.runs for block in blocks]
    split.run_inputs()
    assert [block.runs for block in blocks] == [runs + 1 for runs in before]
    split.run_weights()
    assert [block.runs for block in blocks] == [runs + 2 for runs in before]
    found = [*delivered, *(p.grad for p in blocks.parameters())]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
