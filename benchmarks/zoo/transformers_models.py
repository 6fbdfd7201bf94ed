"""transformers: architectures of every kind, built from tiny configurations.

A configuration gets the small values of ``_TINY`` wherever it knows the name, then its own ones
(``...``: leave the default).
``use_cache`` is off, as for training; the models called "… with cache" have it on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.zoo.subject import Call, Subject
from benchmarks.zoo.transformers_signals import SIGNALS, VOCABULARY
from benchmarks.zoo.transformers_text import TEXT

_LENGTH = 8
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "num_hidden_layers": 4,
    "num_layers": 2,
    "n_layer": 4,
    "n_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "d_kv": 8,
    "n_inner": 64,
    "hidden_dim": 64,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "type_vocab_size": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "use_cache": False,
}
# Converts its own parameters to float32 in forward.
_FLOAT32 = ("Switch",)
# Which layers run is drawn at random in the encoder's and the decoder's own code.
_MAY_BE_WHOLE = ("M2M-100 with layerdrop",)


def subjects() -> Iterator[Subject]:
    """All architectures, by kind."""
    for kind, listed in {**TEXT, **SIGNALS}.items():
        for name, (model, options) in listed.items():
            call = _CALLS.get(name, _CALLS[kind])
            build = functools.partial(_build, model, options)
            yield Subject(
                name=name,
                build=build,
                call=call,
                float64=name not in _FLOAT32,
                may_be_whole=name in _MAY_BE_WHOLE,
            )


def _build(model_name: str, options: dict[str, Any]) -> nn.Module:
    cls = getattr(transformers, model_name)
    return cls(_tiny_config(cls.config_class, options))


def _tiny_config(cls: type[Any], options: dict[str, Any]) -> Any:
    known = cls()
    values = {name: value for name, value in _TINY.items() if hasattr(known, name)}
    return cls(**{name: x for name, x in {**values, **options}.items() if x is not ...})


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape or (2, _LENGTH))


def _call(**makers: Callable[[], Any]) -> Callable[[bool], Call]:
    return lambda training: ((), {name: make() for name, make in makers.items()})


def _mask() -> torch.Tensor:
    mask = torch.ones(2, _LENGTH, dtype=torch.int64)
    mask[1, -2:] = 0
    return mask


def _pixels(side: int = 32) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(2, 3, side, side)


_CALLS: dict[str, Callable[[bool], Call]] = {
    "encoder": _call(input_ids=_ids, attention_mask=_mask),
    "decoder": _call(input_ids=_ids, labels=_ids),
    "mixture of experts": _call(input_ids=_ids, labels=_ids),
    "encoder-decoder": _call(input_ids=_ids, decoder_input_ids=_ids),
    "vision": _call(pixel_values=_pixels()),
    "audio": _call(input_values=lambda: torch.randn(2, 1600)),
    "other": _call(input_ids=_ids),
    # those with a call of their own
    "Whisper": _call(input_features=lambda: torch.randn(2, 16, 40), decoder_input_ids=_ids),
    "Speech2Text": _call(input_features=lambda: torch.randn(2, 40, 16), decoder_input_ids=_ids),
    "AST": _call(input_values=lambda: torch.randn(2, 40, 16)),
    "CLIP": _call(input_ids=_ids, pixel_values=_pixels()),
    "SigLIP": _call(input_ids=_ids, pixel_values=_pixels()),
    "BLIP": _call(input_ids=_ids, pixel_values=_pixels()),
    "ViLT": _call(input_ids=_ids, pixel_values=_pixels()),
    "CANINE": _call(input_ids=lambda: _ids(2, 32)),
    "Longformer": _call(input_ids=lambda: _ids(2, 16)),
    "LED": _call(input_ids=lambda: _ids(2, 16), decoder_input_ids=_ids),
    "Reformer": _call(input_ids=lambda: _ids(2, 16)),
    "MobileViT": _call(pixel_values=_pixels(64)),
    "MobileNetV2": _call(pixel_values=_pixels(64)),
    "Swin": _call(pixel_values=_pixels(64)),
    "Swinv2": _call(pixel_values=_pixels(64)),
    "Segformer": _call(pixel_values=_pixels(64)),
    "LeViT": _call(pixel_values=_pixels(224)),
    "PatchTST": _call(past_values=lambda: torch.randn(2, 32, 2)),
    "DecisionTransformer": _call(
        states=lambda: torch.randn(2, 5, 6),
        actions=lambda: torch.randn(2, 5, 3),
        rewards=lambda: torch.randn(2, 5, 1),
        returns_to_go=lambda: torch.randn(2, 5, 1),
        timesteps=lambda: torch.randint(0, 20, (2, 5)),
        attention_mask=lambda: torch.ones(2, 5),
    ),
    "Perceiver": _call(inputs=_ids),
    "EnCodec": _call(input_values=lambda: torch.randn(2, 1, 640)),
}
