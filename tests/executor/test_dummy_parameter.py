"""Reentrant checkpoints that are given a parameter only so that an input requires a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.oracle import assert_same


class Block(nn.Module):
    """As in MedNeXt: takes the dummy and does nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, dummy: Tensor | None = None) -> Tensor:
        return torch.tanh(self.layer(x))


class Checkpointing(nn.Module):
    def __init__(self, *, through_a_function: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(4, 2)
        self.dummy_tensor = nn.Parameter(torch.tensor([1.0]))
        self.through_a_function = through_a_function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            run = (lambda x, dummy, block=block: block(x)) if self.through_a_function else block
            x = checkpoint(run, x, self.dummy_tensor, use_reentrant=True)
        return self.out(x)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("through_a_function", [False, True])
@pytest.mark.parametrize("schedule", ["GPipe", "InterleavedZeroBubble"])
def test_parameters_have_their_gradients_and_the_dummy_has_none(
    through_a_function: bool, schedule: str
) -> None:
    model = Checkpointing(through_a_function=through_a_function).double()
    spec = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2, "schedule": schedule}
    placed = assert_same(model, spec, (torch.randn(4, 4, dtype=torch.float64),))
    placed(torch.randn(4, 4, dtype=torch.float64)).sum().backward()
    without = [name for name, p in placed.named_parameters() if p.grad is None]
    assert without == ["dummy_tensor"]
