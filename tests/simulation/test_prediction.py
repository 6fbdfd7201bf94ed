"""Cells in which the prediction was wrong once; `python -m benchmarks.memory --matrix` has them all."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import nn
from unet3d import unet3d

import placer


def check(model: nn.Module, args: Any, kwargs: Any = None, **fields: Any) -> None:
    stages = fields.pop("stages")
    spec = {"devices": [f"cuda:{i}" for i in range(stages)], "optimizer": "sgd", **fields}
    plan = placer.make_plan(model, spec, args, kwargs)
    for device in placer.simulate(model, plan, args, kwargs).devices:
        assert device.peak == pytest.approx(device.predicted, rel=0.01), (fields, device)


def test_the_gradient_of_a_shared_weight_comes_home_before_the_first_stage_runs_back() -> None:
    """And a stage that receives a third of a projection keeps a third of it."""
    model = models.TiedTransformer(width=64, length=32, vocabulary=100)
    ids = torch.randint(0, 100, (16, 32))
    check(model, (ids,), stages=3, schedule="1F1B", optimizer="sgd_momentum")
    check(model, (ids,), stages=4, microbatches=2)


def test_a_skip_whose_first_readers_stage_is_not_its_last() -> None:
    """The pooling keeps a cast of its own: the copy that it was made from goes at once."""
    model = unet3d(width=8, depth=4)
    check(model, (torch.randn(4, 1, 32, 32, 32),), stages=4, precision="bf16", optimizer="adam")


def test_inference_has_no_loss_and_keeps_the_results_of_earlier_micro_batches() -> None:
    model, x = models.ConvNet().eval(), torch.randn(256, 1, 8, 8)
    for stages, microbatches in ((1, 2), (4, 1), (4, 2)):
        check(model, (x,), stages=stages, microbatches=microbatches, training=False)
    words = models.KeywordModel().eval()
    kwargs = {"scale": torch.randn(1200, 1), "twice": True}
    for stages in (3, 4):
        check(words, (torch.randn(1200, 6),), kwargs, stages=stages, training=False)
