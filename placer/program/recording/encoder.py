"""What ``nn.TransformerEncoder`` does on its fast path, which it takes without gradients in eval mode.

There it computes on nested tensors, which leave out padding, and pads the result with zeros. A recording
takes the other path, whose values differ only where the sequences are padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_SIGNATURE = inspect.signature(nn.TransformerEncoder.forward)


def find_padding(
    encoder: nn.TransformerEncoder, args: Any, kwargs: Any, grad_enabled: Callable[[], bool]
) -> Tensor | None:
    """The mask of the padding that a call of ``encoder`` fills with zeros; None if it fills none."""
    given = _SIGNATURE.bind(encoder, *args, **kwargs).arguments
    src, padding = given["src"], given.get("src_key_padding_mask")
    first = encoder.layers[0]
    is_fast = (
        padding is not None
        and given.get("mask") is None
        and torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not first.training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
    )
    if not is_fast:
        return None
    differentiated = any(x.requires_grad for x in (src, *first.parameters()))
    return None if differentiated and grad_enabled() else padding


def fill_padding(output: Tensor, padding: Tensor, mask_check: bool) -> Tensor:
    """``output`` with zeros where ``padding`` is set; with ``mask_check`` only if it is all at the ends."""
    padded = padding if padding.dtype == torch.bool else padding != 0
    if mask_check:
        at_ends = (padded.int().cummax(1).values == padded).all()
        padded = padded & at_ends
    return output.masked_fill(padded[..., None], 0.0)
