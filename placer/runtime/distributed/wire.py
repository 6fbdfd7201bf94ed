"""Tensors on the wire: one dimension, one size, whatever the rows of the micro-batch.

``PipelineStage`` wants every micro-batch to send the same sizes. A micro-batch with fewer rows is
computed on its own rows and filled up with zeros only here, so BatchNorm and the loss never see
rows that are not there; the way back cuts the gradient to size again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from placer._torch import reshape_in_place


def to_wire(value: Tensor, numel: int) -> Tensor:
    """``value`` flattened and filled up with zeros to ``numel`` elements, no view of it.

    ``PipelineStage`` detaches what it sent in place when a backward is split.
    """
    missing = numel - value.numel()
    if missing:
        return torch.cat((value.reshape(-1), value.new_zeros(missing)))
    return reshape_in_place(value.contiguous(), (numel,))


def from_wire(wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor of ``shape`` at the start of ``wire``; no view of it: a stage may write to it."""
    numel = math.prod(shape)
    return reshape_in_place(wire if wire.numel() == numel else wire[:numel], shape)


def hollow(wire: Tensor) -> None:
    """Let go of the memory of ``wire`` and keep what autograd asks of a leaf: its shape and ``.grad``.

    ``PipelineStage`` keeps every received tensor until its backward. What was read from the wire
    shares its storage, and now lives as long as it is needed itself.
    """
    wire.data = wire.new_empty_strided(wire.shape, (0,))
