"""The law, over models x stages x replicas x micro-batches, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import torch
import torchvision
from oracle import assert_same
from thin import thin_resnet18, thin_video_model
from torch import nn
from torchvision.models import video
from unet3d import unet3d

from placer import PlacementSpec

pytestmark = pytest.mark.usefixtures("one_capture")

D = torch.float64
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

SMALL: dict[str, Callable[[], Case]] = {
    "keywords and dict results": lambda: (
        models.KeywordModel(),
        (torch.randn(7, 6, dtype=D, requires_grad=True),),
        {"scale": torch.randn(7, 1, dtype=D), "twice": True},
    ),
    "tied transformer": lambda: (models.TiedTransformer(), (torch.randint(0, 17, (7, 6)),), {}),
    "in place": lambda: (models.InPlace(), (torch.randn(8, 2, 5, 5, dtype=D),), {}),
    "recurrent": lambda: (models.Recurrent(), (torch.randn(7, 4, 3, dtype=D),), {}),
    "dropout": lambda: (models.ConvNet(), (torch.randn(9, 1, 8, 8, dtype=D),), {}),
    "3D U-Net": lambda: _unet("group"),
}

LARGE: dict[str, Callable[[], Case]] = {
    "3D U-Net, batch norm": lambda: _unet("batch"),
    "3D U-Net, instance norm": lambda: _unet("instance"),
    "resnet18": lambda: (
        thin_resnet18(classes=5),
        (torch.randn(6, 3, 48, 48, dtype=D),),
        {},
    ),
    "lraspp": lambda: (
        torchvision.models.segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=3
        ),
        (torch.randn(4, 3, 64, 64, dtype=D),),
        {},
    ),
    "r3d_18": lambda: _video(video.r3d_18),
    "mc3_18": lambda: _video(video.mc3_18),
    "r2plus1d_18": lambda: _video(video.r2plus1d_18),
}

CUTS = [(4, 1, 1), (2, 2, 1), (3, 1, 2)]  # stages, replicas, micro-batches; two rows per cut


def _video(build: Callable[[], nn.Module]) -> Case:
    return thin_video_model(build, classes=4), (torch.randn(4, 3, 4, 24, 24, dtype=D),), {}


@cache
def _case(name: str) -> Case:
    """The same model for all tests of a name; they leave it as it is."""
    torch.manual_seed(0)
    model, args, kwargs = (SMALL | LARGE)[name]()
    return model.double(), args, kwargs


def _unet(norm: str) -> Case:
    return unet3d(width=2, depth=3, norm=norm), (torch.randn(5, 1, 8, 8, 8, dtype=D),), {}


def _spec(stages: int, replicas: int, microbatches: int, schedule: str = "GPipe") -> PlacementSpec:
    return PlacementSpec(
        devices=[f"cpu:{i}" for i in range(stages)],
        replicas=replicas,
        microbatches=microbatches,
        schedule=schedule,
        objective="bottleneck",  # even stages
    )


@pytest.mark.matrix(3)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SMALL)
def test_small_models_over_all_cuts(
    name: str, stages: int, replicas: int, microbatches: int
) -> None:
    model, args, kwargs = _case(name)
    schedule = "1F1B" if microbatches == 4 else "GPipe"
    placed = assert_same(model, _spec(stages, replicas, microbatches, schedule), args, kwargs)
    assert len(placed.plan.stages) == stages


@pytest.mark.matrix(1)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", LARGE)
def test_larger_models(name: str, cut: tuple[int, int, int]) -> None:
    model, args, kwargs = _case(name)
    # A second step adds that replicas see the new weights.
    steps = 2 if cut[1] > 1 else 1
    placed = assert_same(model, _spec(*cut), args, kwargs, steps=steps)
    assert len(placed.plan.stages) == cut[0]
    assert all(stage.nodes for stage in placed.plan.stages)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_eval_mode_equals_eager(schedule: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = SMALL["dropout"]()
    assert_same(model.double().eval(), _spec(3, 2, 2, schedule), args, kwargs)
