"""Results of slices give that of the batch; where it is not known how, the call is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import placer

X = torch.randn(8, 4, dtype=torch.float64)


class Assorted(nn.Module):
    """Results of every kind: rows of the batch, of one cut, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        y = self.second(self.first(x).relu()) * scale
        return {
            "rows": y,
            "positions": torch.arange(3),
            "table": self.table * 2,
            "penalty": self.first.weight.square().sum(),
            "scale": scale,
            "weight": self.second.weight,
            "flag": True,
            "sums": y.sum(0) * 2,
            "mean": 1 - y.square().mean() / 3,
            "error": F.mse_loss(y, x[:, :3]),
            "by rows": y.sum() / x.size(0),
            "count": x.size(0),
            "along 1": y.t(),
            "twice": torch.cat([y, y * 2]),
            "tokens": y.unsqueeze(2).expand(-1, -1, 2).reshape(-1, 2),
        }


ONLY_OF_THE_BATCH: dict[str, Callable[[Tensor], Any]] = {
    "largest": lambda y: y.max(),
    "norm": lambda y: y.norm(),
    "a sum and a number": lambda y: y.sum() + 1,
    "numbers of rows": lambda y: torch.arange(y.size(0)),
    "classes": lambda y: F.cross_entropy(y, torch.zeros(y.size(0), dtype=torch.int64)),
    "a product of means": lambda y: y.mean() * y.mean(),
}


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
    assert result.keys() == expected.keys()
    for name in expected:
        assert_close(result[name], expected[name], rtol=1e-12, atol=0, msg=name)

    for output in (result, expected):
        (output["rows"].sum() + output["penalty"] + output["weight"].sum()).backward()
    for (name, ours), theirs in zip(placed.named_parameters(), model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0, msg=name)


class Returns(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.result = nn.Linear(4, 3).double(), result

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y, self.result(y)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ONLY_OF_THE_BATCH)
def test_a_result_that_slices_do_not_give_is_an_error_of_the_call(name: str) -> None:
    model = Returns(ONLY_OF_THE_BATCH[name])
    placed = placer.compile(model, {"devices": ["cpu:0"], "microbatches": 2}, X)
    with pytest.raises(placer.PlacerError, match=r"result 1: .* not known"):
        placed(X)
    loss = placed.step(X, loss_fn=lambda output: output[0].mean())  # sees the results of slices
    assert_close(loss, model(X)[0].mean().detach(), rtol=1e-12, atol=0)
    one = placer.compile(model, {"devices": ["cpu:0"]}, X)
    assert_close(one(X), model(X), rtol=0, atol=0)
