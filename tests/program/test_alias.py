"""Which nodes write what earlier nodes, inputs and buffers hold, and so must share a stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placer.program import lower


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        view, total = y.view(-1), y.sum()  # what they read is written later
        y.relu_()
        seen.add_(1)
        self.calls.mul_(2)
        return view, total, y.mean()


def test_what_is_written_and_who_used_it_before() -> None:
    program = lower(Writes(), (torch.randn(2, 4), torch.zeros(2)))
    (group,) = [each for each in program.colocated if "relu_" in each]
    assert {"first", "view", "sum_1", "relu_"} <= {*group} and "mean" not in group
    assert {name: node.writes for name, node in program.nodes.items() if node.writes} == {
        "mul_": ("calls",)
    }
    assert program.written_inputs == ("seen",)
