"""Which parameters get gradients: not the frozen ones, and none that the loss does not depend on."""

from __future__ import annotations

import pytest
import torch
from models import ConvNet, InPlace
from oracle import assert_same
from torch import Tensor, nn

import placer


@pytest.mark.matrix(1)
@pytest.mark.parametrize("frozen", [("conv1",), ("conv2", "fc1"), ("conv1", "conv2", "fc1")])
def test_frozen_layers(frozen: tuple[str, ...]) -> None:
    model = ConvNet().double()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    placed = assert_same(
        model, {"devices": ["cpu:0", "cpu:1"]}, (torch.randn(4, 1, 8, 8, dtype=torch.float64),)
    )
    without = {name for name, p in placed.named_parameters() if p.grad is None}
    assert {name.split(".")[0] for name in without} == set(frozen)


def test_frozen_batch_norm_over_replicas() -> None:
    model = InPlace().double()
    model.first.requires_grad_(False)
    model.bn.requires_grad_(False)
    spec = {"devices": ["cpu:0", "cpu:1"], "replicas": 2, "microbatches": 2}
    assert_same(model, spec, (torch.randn(8, 2, 6, 6, dtype=torch.float64),))


class Unused(nn.Module):
    """The first branch crosses to the second stage, where it is only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.used = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.branch(x)
        used = self.used(x)
        unread = self.head(branch)
        return self.head(used) + unread.detach()


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_no_gradient_is_none_and_not_zero(schedule: str) -> None:
    layers = {"branch": "cpu:0", "used": "cpu:0", "head": "cpu:1"}
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers, "microbatches": 2, "replicas": 2}
    x = torch.randn(8, 4, dtype=torch.float64)
    placed = assert_same(Unused().double(), {**spec, "schedule": schedule}, (x,))
    placed.zero_grad()
    placed.step(x, loss_fn=lambda y: y.square().mean())
    assert all(p.grad is None for n, p in placed.named_parameters() if n.startswith("branch"))
    assert placed.get_parameter("used.weight").grad is not None


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_checkpointed_layer_that_writes_its_weight(microbatches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 4)).double()
    spec = {"devices": ["cpu:0", "cpu:1"], "checkpoint": ["0"], "microbatches": microbatches}
    x = torch.randint(9, (4, 3))
    if microbatches == 1:
        assert_same(model, spec, (x,))
        return
    with pytest.raises(placer.CaptureError, match=r"sets the parameter 0\.weight from the batch"):
        placer.compile(model, spec, x)
