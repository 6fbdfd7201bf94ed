"""Results that the batch does not reach are those of the uncut model; all others are joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import placer

X = torch.randn(8, 4, dtype=torch.float64)


class Assorted(nn.Module):
    """Results of every kind: rows of the batch, of one cut, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        y = self.second(self.first(x).relu()) * scale
        sums = torch.zeros(3, dtype=x.dtype)
        sums.add_(y.sum(0))
        self.seen += y.detach().sum()
        return {
            "rows": y,
            "positions": torch.arange(3),
            "table": self.table * 2,
            "penalty": self.first.weight.square().sum(),
            "scale": scale,
            "weight": self.second.weight,
            "flag": True,
            "sums": sums,
            "mean": y.mean(),
            "seen": self.seen.clone(),
            "lines": torch.arange(x.size(0)),
        }


OF_ALL = ("positions", "table", "penalty", "scale", "weight")
OF_CUTS = {"rows": (8, 3), "sums": (12,), "mean": (4,), "seen": (8,), "lines": (8,)}


@pytest.mark.parametrize("stages", [1, 2])
def test_only_what_depends_on_the_batch_is_joined(stages: int) -> None:
    torch.manual_seed(0)
    model, scale = Assorted(), torch.full((3,), 2.0, dtype=torch.float64)
    placed = placer.compile(
        model,
        {"devices": [f"cpu:{i}" for i in range(stages)], "replicas": 2, "microbatches": 2},
        (X, scale),
        run_on="cpu",
    )
    result = placed(X, scale)
    expected = model(X, scale)
    assert result["flag"] is True
    for name in OF_ALL:
        assert_close(result[name], expected[name], rtol=1e-12, atol=0)
    assert {name: tuple(result[name].shape) for name in OF_CUTS} == OF_CUTS
    assert_close(result["rows"], expected["rows"], rtol=1e-12, atol=0)

    for output in (result, expected):
        (output["rows"].sum() + output["penalty"] + output["weight"].sum()).backward()
    for (name, ours), theirs in zip(placed.named_parameters(), model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0, msg=name)
