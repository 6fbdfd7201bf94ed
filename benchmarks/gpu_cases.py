"""The training steps from which the rates of an H100 were made: their models, inputs and specs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.memory_gpu import CASES, cube
from benchmarks.record import gpu_name
from placer.machine.catalogue import CATALOGUE

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


def gpu_kind(name: str | None = None) -> str:
    """The kind in the catalogue of a GPU with this name, by default of this machine's.

    >>> gpu_kind("NVIDIA H100 80GB HBM3"), gpu_kind("NVIDIA GeForce RTX 4090")
    ('h100', 'rtx4090')
    """
    name = gpu_name() if name is None else name
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    found = [kind for kind in CATALOGUE if kind in joined]
    if not found:
        raise ValueError(f"the catalogue has no kind for {name}; `placer calibrate` measures one")
    return max(found, key=len)
