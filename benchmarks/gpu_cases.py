"""The training steps from which the rates of an H100 were made: their models, inputs and specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory_gpu import CASES, cube

DEVICE = "cuda:0"
Build = Callable[[], tuple[nn.Module, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUCase:
    """A model with its batch; ``family``: the models that are like it."""

    family: str
    build: Build
    fields: Mapping[str, Any] = field(default_factory=dict)


def _resnet50() -> tuple[nn.Module, Tensor]:
    import torchvision

    return torchvision.models.resnet50(), torch.empty(64, 3, 224, 224)


_BF16 = {"precision": "bf16"}
PROFILED = {
    "unet3d-96": GPUCase(family="U-Net", build=cube("U-Net", 96)),
    "unet3d-160": GPUCase(family="U-Net", build=cube("U-Net", 160)),
    "unet3d-128-bf16": GPUCase(family="U-Net", build=cube("U-Net", 128), fields=_BF16),
    "segresnet-128": GPUCase(family="SegResNet", build=cube("SegResNet", 128)),
    "dynunet-160": GPUCase(family="DynUNet", build=cube("DynUNet", 160)),
    "resnet50-64x224": GPUCase(family="ResNet", build=_resnet50),
    "gpt2-8x512": GPUCase(family="GPT-2", build=CASES["GPT-2 size, 8 x 512"].build),
    "gpt2-8x512-bf16": GPUCase(
        family="GPT-2", build=CASES["GPT-2 size, 8 x 512"].build, fields=_BF16
    ),
}
