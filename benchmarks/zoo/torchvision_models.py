"""torchvision: every model of classification, segmentation, video, optical flow and detection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchvision import models

from benchmarks.zoo.subject import Call, Subject, positional

# What a model needs that is not the default: sizes that its architecture asks for.
_SIDE = {"inception_v3": 299, "maxvit_t": 224}
_FRAMES = {"s3d": (16, 224), "mvit_v1_b": (16, 224), "mvit_v2_s": (16, 224)}


def subjects() -> Iterator[Subject]:
    """All of ``list_models()`` except quantized models; classifiers last, smallest first."""
    yield from _dense_models()
    for name in sorted(models.list_models(module=models), key=_parameters):
        yield Subject(name=name, build=_classifier(name), call=_images(name))


def _parameters(name: str) -> int:
    return int(models.get_model_weights(name).DEFAULT.meta["num_params"])


def _dense_models() -> Iterator[Subject]:
    for name in models.list_models(module=models.segmentation):
        build = functools.partial(
            models.get_model, name, weights=None, weights_backbone=None, num_classes=4
        )
        yield Subject(name=name, build=build, call=positional((2, 3, 64, 64)))
    for name in models.list_models(module=models.video):
        frames, side = _FRAMES.get(name, (8, 64))
        build = functools.partial(models.get_model, name, weights=None, num_classes=10)
        yield Subject(name=name, build=build, call=positional((2, 3, frames, side, side)))
    for name in models.list_models(module=models.optical_flow):
        build = functools.partial(models.get_model, name, weights=None)
        yield Subject(name=name, build=build, call=_frame_pair)
    for name in models.list_models(module=models.detection):
        build = functools.partial(_detector, name)
        yield Subject(name=name, build=build, call=_scenes(name), may_be_whole=True)


def _regnet_y_128gf(**options: Any) -> torch.nn.Module:
    """A quarter of the width, and so of the group width: 40 of 645 million parameters."""
    blocks = models.regnet.BlockParams.from_init_params(
        depth=27, w_0=112, w_a=40.21, w_m=2.52, group_width=66, se_ratio=0.25
    )
    return models.regnet.RegNet(block_params=blocks, num_classes=options["num_classes"])


def _shallow_vit(patch_size: int, hidden: int, **options: Any) -> torch.nn.Module:
    """Four blocks of 24 or 32."""
    del options["weights"]
    return models.VisionTransformer(
        patch_size=patch_size,
        num_layers=4,
        num_heads=16,
        hidden_dim=hidden,
        mlp_dim=4 * hidden,
        **options,
    )


# Models of more than 300 million parameters, smaller: the same blocks, fewer or less wide.
_REDUCED: dict[str, Callable[..., torch.nn.Module]] = {
    "regnet_y_128gf": _regnet_y_128gf,
    "vit_l_16": functools.partial(_shallow_vit, 16, 1024),
    "vit_l_32": functools.partial(_shallow_vit, 32, 1024),
    "vit_h_14": functools.partial(_shallow_vit, 14, 1280),
}


def _classifier(name: str) -> Any:
    options: dict[str, Any] = {"weights": None, "num_classes": 10}
    if name.startswith("vit_"):
        options["image_size"] = 56 if name == "vit_h_14" else 64
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # scipy's truncated normal, slow
    build = _REDUCED.get(name) or functools.partial(models.get_model, name)
    return functools.partial(build, **options)


def _images(name: str) -> Any:
    side = _SIDE.get(name, 56 if name == "vit_h_14" else 64)
    return positional((2, 3, side, side))


def _frame_pair(training: bool) -> Call:
    frames = torch.randn(2, 2, 3, 128, 128).unbind(0)
    return frames, {"num_flow_updates": 3}


def _detector(name: str) -> torch.nn.Module:
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 4}
    if not name.startswith("ssd"):
        options.update(min_size=96, max_size=128)
    return models.get_model(name, **options)


def _scenes(name: str) -> Any:
    def call(training: bool) -> Call:
        images = [torch.rand(3, 96, 96), torch.rand(3, 96, 112)]
        return (images, [_target(name) for _ in images] if training else None), {}

    return call


def _target(name: str) -> dict[str, Any]:
    target: dict[str, Any] = {
        "boxes": torch.tensor([[8.0, 8.0, 40.0, 56.0], [30.0, 20.0, 90.0, 80.0]]),
        "labels": torch.tensor([1, 2]),
    }
    if name.startswith("maskrcnn"):
        target["masks"] = (torch.rand(2, 96, 96) > 0.5).to(torch.uint8)
    if name.startswith("keypointrcnn"):
        target["keypoints"] = torch.cat([torch.rand(2, 17, 2) * 60 + 10, torch.ones(2, 17, 1)], 2)
        target["labels"] = torch.tensor([1, 1])
    return target
