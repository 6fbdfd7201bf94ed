"""Fine-tuning: parts of the model are frozen and have no gradients, wherever they are placed."""

from __future__ import annotations

import pytest
import torch
from models import ConvNet, InPlace
from oracle import assert_same


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
