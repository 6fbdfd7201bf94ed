"""Cells that were once predicted wrong; `python -m benchmarks.memory --matrix` has all cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
import torchvision
from captured import captured_once
from placements import estimated_plan
from programs import Program, Step, inputs
from torch import nn
from unet3d import unet3d

import placer


@pytest.fixture(autouse=True)
def _one_capture() -> Iterator[None]:
    with captured_once():
        yield


def check(model: nn.Module, args: Any, kwargs: Any = None, **fields: Any) -> None:
    stages = fields.pop("stages")
    spec = {"devices": [f"cuda:{i}" for i in range(stages)], "optimizer": "sgd", **fields}
    plan = estimated_plan(model, spec, args, kwargs)
    for device in placer.simulate(model, plan, args, kwargs).devices:
        assert device.peak == pytest.approx(device.predicted, rel=0.01), (fields, device)


def test_the_gradient_of_a_shared_weight_comes_home_before_the_first_stage_runs_back() -> None:
    """Also, a stage that receives a third of a projection keeps only that third."""
    model = models.TiedTransformer(width=64, length=32, vocabulary=100)
    ids = torch.randint(0, 100, (16, 32))
    check(model, (ids,), stages=3, schedule="1F1B", optimizer="sgd_momentum")
    check(model, (ids,), stages=4, microbatches=2)


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
    unet = unet3d(width=8, depth=2)
    check(unet, (torch.randn(4, 1, 16, 16, 16),), stages=2, microbatches=3)
    model = models.TiedTransformer(width=64, length=32, vocabulary=100)
    ids = torch.randint(0, 100, (16, 32))
    check(model, (ids,), stages=2, microbatches=3, precision="bf16")
    check(model.eval(), (ids,), stages=2, microbatches=3, training=False)


def test_inference_casts_weights_as_the_stage_does() -> None:
    """A cast that autocast caches requires grad, and torch then uses another matrix product kernel."""
    model, x = models.Recurrent().eval(), torch.randn(120, 40, 3)
    check(model, (x,), stages=3, precision="bf16", training=False)


class OwnConv(nn.Conv2d):
    """Captured as a function call with its weight, which is a separate node."""


class Fork(nn.Module):
    """A result that its own activation saves is read by two strided convolutions."""

    def __init__(self, conv: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.long = conv(16, 32, 3, stride=2, padding=1)
        self.short = nn.Conv2d(16, 32, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.long(x) + self.short(x)


def test_gradients_are_added_up_after_the_received_copy_is_let_go() -> None:
    layers = {"stem": "cuda:0", "long": "cuda:1", "short": "cuda:1"}
    check(Fork(), (torch.randn(4, 3, 32, 32),), stages=2, layers=layers)


def test_the_scalars_of_a_step_are_counted() -> None:
    """Visible in a stage of a few hundred bytes: losses count; received values need no extra bytes."""
    model, x = models.InPlace(), torch.randn(8, 2, 64, 64)
    for microbatches, schedule in ((3, "1F1B"), (4, "GPipe")):
        check(model, (x,), stages=4, microbatches=microbatches, schedule=schedule)


def test_a_stage_gets_its_own_copy_of_a_gradient_that_another_one_hands_to_two() -> None:
    """With a cut between a branch and the addition, one gradient goes to both, each by its own path."""
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=256
    )
    layers = {
        "**": "cuda:1",
        "conv_proj": "cuda:0",
        "encoder.dropout": "cuda:0",
        "encoder.layers.encoder_layer_0": "cuda:0",
        "encoder.layers.encoder_layer_0.mlp.4": "cuda:1",
    }
    check(model, (torch.randn(16, 3, 32, 32),), stages=2, layers=layers)


def test_what_waits_on_the_host_is_on_the_device_only_while_it_is_read() -> None:
    """Parts of a projection are fetched one by one; a pooling's input is freed before gradients are added."""
    check(unet3d(width=8, depth=3), (torch.randn(4, 1, 32, 32, 32),), stages=1, offload=["*"])
    model = models.TiedTransformer(width=64, length=32, vocabulary=100)
    ids = torch.randint(0, 100, (16, 32))
    for stages, microbatches in ((1, 1), (2, 2)):
        check(model, (ids,), stages=stages, microbatches=microbatches, offload=["*"])
    check(models.Recurrent(), (torch.randn(120, 40, 3),), stages=2, offload=["inp", "out"])


def test_a_stage_runs_its_nodes_in_the_order_that_its_peak_is_of() -> None:
    """An unread value is computed first, so that it is freed before the concatenation."""
    steps = (
        *(Step("drop", 21, 21, 0), Step("activate", 28, 15, 12), Step("concatenate", 26, 18, 21)),
        *(Step("multiply", 15, 0, 0), Step("add_", 0, 0, 0), Step("drop", 0, 0, 0)),
        *(Step("drop", 0, 0, 0), Step("activate", 0, 0, 0), Step("multiply", 19, 0, 0)),
        *(Step("factory", 0, 0, 0), Step("parameter", 24, 0, 0), Step("conv", 0, 0, 0)),
    )
    model = Program(steps, (), "tensor").double()
    names = [{"name": f"cuda:{i}", "memory": "7813 B"} for i in range(3)]
    spec = {"devices": names, "reserve": 0, "context": 0, "objective": "memory"}
    batch = inputs(1, scaled=False)
    plan = estimated_plan(model, spec, batch)
    for device in placer.simulate(model, plan, batch).devices:
        assert device.peak <= device.predicted * 1.01, device


def test_a_region_that_the_boundary_of_a_stage_cuts() -> None:
    """Its backward begins with nodes that save nothing; a stage receives only parts of a projection."""
    model = models.TiedTransformer(width=32, length=16, vocabulary=20)
    ids = torch.randint(0, 20, (16, 16))
    check(model, (ids,), stages=4, checkpoint=["*"])
    check(model, (ids,), stages=3, checkpoint=["*"], offload=["*"])


def test_the_forwards_after_a_backward_are_those_of_the_schedule() -> None:
    """There are none under GPipe; under 1F1B, it may be only the smaller last micro-batch."""
    unet, x = unet3d(width=8, depth=3, norm="instance"), torch.randn(4, 1, 16, 16, 16)
    both = {"checkpoint": ["*"], "offload": ["*"]}
    check(unet, (x,), stages=4, microbatches=2, optimizer="sgd_momentum", **both)
    model, images = models.ConvNet(), torch.randn(256, 1, 8, 8)
    check(model, (images,), stages=4, microbatches=3, schedule="1F1B", precision="bf16")


def test_a_recurrent_kernel_reads_all_that_it_saved() -> None:
    check(models.Recurrent(), (torch.randn(120, 40, 3),), stages=1, checkpoint=["*"])


@pytest.mark.parametrize("conv", [nn.Conv2d, OwnConv])
def test_what_a_region_reads_is_let_go_before_gradients_of_its_readers_add_up(
    conv: type[nn.Conv2d],
) -> None:
    """If the region's first saver is one of these readers, and the value came from the previous stage."""
    layers = {"stem": "cuda:0", "long": "cuda:1", "short": "cuda:1"}
    images = torch.randn(4, 3, 32, 32)
    check(Fork(conv), (images,), stages=2, layers=layers, checkpoint=["*"])


def test_a_gradient_stays_until_the_last_stage_has_taken_it() -> None:
    """The gradient of a sum whose second branch is on an earlier stage than its first one."""
    nets = pytest.importorskip("monai.networks.nets")
    options = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    with torch.device("meta"):
        model = nets.AttentionUnet(**options, channels=(16, 32, 64, 128), strides=(2, 2, 2))
        volume = torch.empty(2, 1, 64, 64, 64)
    check(model, (volume,), stages=3, objective="memory")


class ReadThrice(nn.Module):
    """Three stages read a value that its own activation saves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.first, self.second, self.third = (nn.Conv2d(16, 4, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.stem(x)
        return self.first(x), self.second(x), self.third(x)


@pytest.mark.parametrize("first", ["cuda:0", "cuda:1"])
def test_gradients_that_come_from_several_stages_are_added_up_in_one_tensor(first: str) -> None:
    """In addition to the gradient of the stage's own readers, which autograd keeps until then."""
    layers = {"stem": "cuda:0", "first": first, "second": "cuda:1", "third": "cuda:2"}
    check(ReadThrice(), (torch.randn(4, 3, 512, 512),), stages=3, layers=layers)


def test_a_stage_that_starts_after_the_other_readers_adds_up_nothing() -> None:
    """Of a block's two paths, the one recorded last, which has one operation, comes first in this order."""
    model = torchvision.models.video.mc3_18(num_classes=4)
    fields = {"microbatches": 2, "optimizer": "sgd_momentum", "offload": ["*"]}
    check(model, (torch.randn(4, 3, 8, 32, 32),), stages=4, **fields)
