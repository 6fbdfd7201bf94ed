"""timm: the smallest model of every architecture family (``timm.list_modules()``).

The names were found by building every model of a family on ``meta`` and counting parameters, those
from nextvit on by their names. Families whose smallest model has more than 80 million parameters are
built with four blocks where they take a ``depth``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import nn

from benchmarks.zoo.subject import Call, Subject

_SMALLEST = [
    "beit_base_patch16_224",
    "halonet_h1",
    "test_byobnet",
    "cait_xxs24_224",
    "coat_tiny",
    "convit_tiny",
    "convmixer_768_32",
    "test_convnext",
    "cpubone_nano",
    "crossvit_tiny_240",
    "csatv2",
    "cs3darknet_focus_s",
    "cspnext_tiny",
    "davit_tiny",
    "deepseek_vit_412m",
    "deit_tiny_patch16_224",
    "densenet121",
    "dla46x_c",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "test_efficientnet",
    "efficientvim_m1",
    "efficientvit_b0",
    "efficientvit_m0",
    "vit_tiny_patch16_dinov3_qkvb",
    "fasternet_t0",
    "fastvit_t8",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "gemma4_vit_167m_enc",
    "ghostnet_050",
    "hardcorenas_b",
    "hgnetv2_b0",
    "hiera_tiny_224",
    "sam2_hiera_tiny",
    "hrnet_w18_small",
    "iformer_t",
    "inception_next_atto",
    "inception_resnet_v2",
    "inception_v3",
    "inception_v4",
    "lcnetv2_small",
    "levit_128s",
    "lowformer_b0",
    "test_mambaout",
    "test_coatnet",
    "poolformerv2_s12",
    "gmlp_ti16_224",
    "lcnet_035",
    "mobilenetv5_base",
    "mobilevit_xxs",
    "mvitv2_tiny",
    "naflexvit_base_patch16_parfac_gap",
    "nasnetalarge",
    "nest_tiny",
    "nextvit_small",
    "test_nfnet",
    "pit_ti_224",
    "pnasnet5large",
    "pvt_v2_b0",
    "qwen3_vit_88m",
    "rdnet_tiny",
    "regnetx_002",
    "repghostnet_050",
    "repvit_m0_9",
    "res2net50_14w_8s",
    "resnest14d",
    "test_resnet",
    "resnetv2_18",
    "rexnet_100",
    "selecsls42",
    "legacy_seresnet18",
    "sequencer2d_s",
    "shvit_s1",
    "skresnet18",
    "starnet_s050",
    "swiftformer_xs",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224",
    "tiny_vit_5m_224",
    "tnt_s_patch16_224",
    "tresnet_m",
    "twins_svt_small",
    "vgg11",
    "visformer_tiny",
    "test_vit",
    "vit_tiny_r_s16_p8_224",
    "test_vit_relpos",
    "samvit_base_patch16_224",
    "vitamin_small_224",
    "volo_d1_224",
    "ese_vovnet19b_slim_dw",
    "legacy_xception",
    "xception41",
    "xcit_nano_12_p16_224",
]
_SHALLOW = (
    "beit_base_patch16_224",
    "deepseek_vit_412m",
    "gemma4_vit_167m_enc",
    "naflexvit_base_patch16_parfac_gap",
    "qwen3_vit_88m",
    "samvit_base_patch16_224",
)
_SIDES = (64, 96, 128, 192)


def subjects() -> Iterator[Subject]:
    """One model per family, by the family's name."""
    for name in sorted(_SMALLEST, key=lambda name: not name.startswith("test_")):
        yield Subject(
            name=name, build=functools.partial(_build, name), call=functools.partial(_images, name)
        )


def _build(name: str) -> nn.Module:
    side, resized = _fitting(name)
    return _create(name, side if resized else None)


def _images(name: str, training: bool) -> Call:
    side, _ = _fitting(name)
    return (torch.randn(2, 3, side, side),), {}


def _create(name: str, side: int | None) -> nn.Module:
    options: dict[str, Any] = {"depth": 4} if name in _SHALLOW else {}
    if side is not None:
        options["img_size"] = side
    return timm.create_model(name, num_classes=10, **options)


@functools.cache
def _fitting(name: str) -> tuple[int, bool]:
    """The smallest image side that the model runs on, and whether the model must be built for it."""
    fixed = bool(timm.get_pretrained_cfg(name, allow_unregistered=True).fixed_input_size)
    for resized in (True, False) if fixed else (False, True):
        for side in _SIDES:
            if _runs(name, side, resized):
                return side, resized
    side = timm.get_pretrained_cfg(name, allow_unregistered=True).input_size[-1]
    return side, False


def _runs(name: str, side: int, resized: bool) -> bool:
    try:
        with torch.device("meta"), torch.no_grad():
            model = _create(name, side if resized else None).train()
            model(torch.empty(2, 3, side, side))
    except Exception:  # each model says in its own way that a size does not suit it
        return False
    return True
