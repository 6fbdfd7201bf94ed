"""`placer.Whole` and `placer.Batched` around arguments and targets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

SPEC = {
    "devices": [f"cuda:{i}" for i in range(4)],
    "layers": {"first": "cuda:0", "last": "cuda:1"},
    "replicas": 2,
    "microbatches": 2,
}


class Net(nn.Module):
    """``prior`` has a row for every row of the batch or is added as it is; ``state`` is (1, batch, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, prior: Tensor, batch: dict[str, Tensor]) -> Tensor:
        found = self.first(x + batch["state"][0])
        return self.last(found * prior.mean(0))


@pytest.fixture
def given() -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
    """A model, inputs that do not tell how they are split, and the same inputs with marks."""
    torch.manual_seed(0)
    x, prior, state = (torch.randn(s, dtype=torch.float64) for s in ((8, 6), (8, 6), (1, 8, 6)))
    plain = x, prior, {"state": state}
    return (
        Net().double(),
        plain,
        (x, placer.Whole(prior), {"state": placer.Batched(state, dim=1)}),
    )


def _same(placed: nn.Module, model: nn.Module, given: Any, args: Any) -> None:
    for each, inputs in ((placed, given), (model, args)):
        each.zero_grad()
        each.found = each(*inputs)
        each.found.square().mean().backward()
    torch.testing.assert_close(placed.found, model.found)
    for (name, a), b in zip(placed.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_an_example_with_marks_is_split_as_they_say(given: Any) -> None:
    model, args, marked = given
    placed = placer.compile(copy.deepcopy(model), SPEC, marked, run_on="cpu")
    assert placed.plan.batch_dims == {"prior": None, "batch.state": 1}
    _same(placed, model, args, args)  # later calls need no marks
    _same(placed, model, marked, args)


def test_a_call_with_other_marks_is_split_as_they_say() -> None:
    """Captured with inputs that are split; a later call gives all rows of one to every slice."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, prior: Tensor) -> Tensor:
            found = self.first(x)
            return self.last(found + (prior if len(prior) == len(x) else prior.sum(0)))

    torch.manual_seed(0)
    model = Mean().double()
    x, prior = torch.randn(2, 8, 6, dtype=torch.float64)
    spec = {**SPEC, "inputs": {"prior": {"batch_dim": 0}}}
    placed = placer.compile(copy.deepcopy(model), spec, (x, prior), run_on="cpu")
    _same(placed, model, (x, prior), (x, prior))
    few = torch.randn(3, 6, dtype=torch.float64)
    _same(placed, model, (x, placer.Whole(few)), (x, few))
    _same(placed, model, (x, prior), (x, prior))


def test_a_step_takes_marks_for_inputs_and_targets(given: Any) -> None:
    model, args, marked = given
    placed = placer.compile(copy.deepcopy(model), SPEC, marked, run_on="cpu")
    weights, wanted = torch.rand(6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)

    def loss_fn(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - target[0].T).square() * target[1]).mean()

    target = placer.Batched(wanted, dim=-1), placer.Whole(weights)
    loss = placed.step(*marked, target=target, loss_fn=loss_fn)
    expected = loss_fn(model(*args), (wanted, weights))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for a, b in zip(placed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_wrong_marks_are_errors_that_name_the_input(given: Any) -> None:
    model, (x, prior, batch), _ = given
    with pytest.raises(
        placer.CaptureError, match=r"prior: is placer.Batched\(…, dim=2\), but has 2 dim"
    ):
        placer.compile(model, SPEC, (x, placer.Batched(prior, 2), batch), run_on="cpu")
    state = placer.Batched(batch["state"], dim=1)
    placed = placer.compile(model, SPEC, (x, placer.Whole(prior), {"state": state}), run_on="cpu")
    with pytest.raises(placer.PlacerError, match="target: has 6 rows, the batch has 8"):
        placed.step(
            x,
            prior,
            batch,
            target=placer.Batched(torch.zeros(6, 8)),
            loss_fn=nn.functional.mse_loss,
        )
