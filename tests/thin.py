"""Residual networks of torchvision with an eighth of the channels after their stem."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import nn
from torchvision.models import ResNet, resnet18
from torchvision.models.video import VideoResNet


def thin_resnet18(classes: int) -> nn.Module:
    return _make_thin(ResNet, resnet18, classes)


def thin_video_model(build: Callable[..., nn.Module], classes: int) -> nn.Module:
    """``build`` is one of ``r3d_18``, ``mc3_18`` and ``r2plus1d_18``."""
    return _make_thin(VideoResNet, build, classes)


def _make_thin(kind: Any, build: Callable[..., nn.Module], classes: int) -> nn.Module:
    make_layer = kind._make_layer
    signature = inspect.signature(make_layer)

    def make_thin_layer(*args: Any, **kwargs: Any) -> nn.Sequential:
        call = signature.bind(*args, **kwargs)
        call.arguments["planes"] //= 8
        made: nn.Sequential = make_layer(*call.args, **call.kwargs)
        return made

    with mock.patch.object(kind, "_make_layer", make_thin_layer):
        model = build()
    model.fc = nn.Linear(512 // 8, classes)
    return model
