"""Cells that were once predicted wrong; `python -m benchmarks.memory --matrix` has all cells."""

from __future__ import annotations

from functools import cache
from typing import Any

import models
import pytest
import torch
from placements import estimated_plan
from torch import nn
from unet3d import unet3d

import placer

pytestmark = pytest.mark.usefixtures("one_capture")


def check(
    model: nn.Module, args: Any, kwargs: Any = None, *, above: float = 0.01, **fields: Any
) -> None:
    """Predictions are at most 1 % below the peaks of the dry run, and at most ``above`` above them."""
    stages = fields.pop("stages")
    spec = {"devices": [f"cuda:{i}" for i in range(stages)], "optimizer": "sgd", **fields}
    plan = estimated_plan(model, spec, args, kwargs)
    for device in placer.simulate(model, plan, args, kwargs).devices:
        assert -above < device.peak / device.predicted - 1 < 0.01, (fields, device)


@cache
def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Its input and its output have one weight."""
    model = models.TiedTransformer(width=64, length=32, vocabulary=100)
    return model, torch.randint(0, 100, (16, 32))


@cache
def unet() -> tuple[nn.Module, torch.Tensor]:
    return unet3d(width=8, depth=2), torch.randn(4, 1, 16, 16, 16)


def test_the_gradient_of_a_shared_weight_comes_home_before_the_first_stage_runs_back() -> None:
    """A stage that receives a third of a projection is taken to keep all of it."""
    model, ids = transformer()
    check(model, (ids,), stages=3, schedule="1F1B", optimizer="sgd_momentum")
    check(model, (ids,), stages=4, microbatches=2, above=0.15)


def test_a_skip_whose_first_readers_stage_is_not_its_last() -> None:
    """The pooling keeps its own cast, so the copy that it was made from is freed at once."""
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


def test_a_batch_that_does_not_divide_evenly_has_a_smaller_last_micro_batch() -> None:
    """4 rows in 3 give 2 + 2, 16 rows give 6 + 6 + 4; autocast's weight copies do not shrink with rows."""
    model, x = unet()
    check(model, (x,), stages=2, microbatches=3)
    model, ids = transformer()
    check(model, (ids,), stages=2, microbatches=3, precision="bf16")
    check(model.eval(), (ids,), stages=2, microbatches=3, training=False)
    model.train()


def test_what_waits_on_the_host_is_on_the_device_only_while_it_is_read() -> None:
    """Parts of a projection are fetched one by one; a pooling's input is freed before gradients are added."""
    model, x = unet()
    check(model, (x,), stages=1, offload=["*"])
    model, ids = transformer()
    for stages, microbatches in ((1, 1), (2, 2)):
        check(model, (ids,), stages=stages, microbatches=microbatches, offload=["*"])
    check(models.Recurrent(), (torch.randn(120, 40, 3),), stages=2, offload=["inp", "out"])


def test_a_region_that_the_boundary_of_a_stage_cuts() -> None:
    """Its backward begins with nodes that save nothing; a stage that receives a part counts the whole."""
    model = models.TiedTransformer(width=32, length=16, vocabulary=20)
    ids = torch.randint(0, 20, (16, 16))
    check(model, (ids,), stages=4, checkpoint=["*"], above=0.15)
    check(model, (ids,), stages=3, checkpoint=["*"], offload=["*"])
