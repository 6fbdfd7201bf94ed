"""What a weight has of earlier steps: how often it was changed, and its gradient."""

from __future__ import annotations

import pytest
import torch
from other_inputs import WAYS, compile_way
from torch import Tensor, nn

import placer

X = torch.randn(6, 4)


class Cached(nn.Linear):
    """Computes the norm of its weight anew after a change, as layers that cache a derived weight do."""

    seen, norm = -1, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        if self.weight._version != self.seen:
            self.seen, self.norm = self.weight._version, self.weight.detach().norm()
        return super().forward(x) / self.norm


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.weight._version)


class Scaled(nn.Linear):
    """Divides by the norm of the last step's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.weight.grad is None else y / self.weight.grad.norm()


class Zeroing(nn.Linear):
    """Drops the gradients of earlier steps, which a run on fake tensors has not."""

    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return super().forward(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(Cached, "_version"), (Counting, "_version"), (Scaled, "grad"), (Zeroing, "grad")],
)
def test_it_is_refused(kind: type[nn.Linear], name: str, way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
    with pytest.raises(placer.CaptureError, match=rf"reads the {name} .*test_earlier_steps.py:\d+"):
        compile_way(model, (X,), way)
