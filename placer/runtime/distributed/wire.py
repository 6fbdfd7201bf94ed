"""Tensors on the wire: one dimension, one size, whatever the rows of the micro-batch.

``PipelineStage`` wants every micro-batch to send the same sizes. A micro-batch with fewer rows is
computed on its own rows and filled up with zeros only here, so BatchNorm and the loss never see
rows that are not there; the way back cuts the gradient to size again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _ToWire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, numel: int) -> Tensor:
        ctx.shape = value.shape
        return _fill(value.reshape(-1), numel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][: ctx.shape.numel()].view(ctx.shape), None


class _FromWire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.numel = wire.numel()
        # Detached last, it is no view for autograd: a stage may write to it in place.
        return wire[: torch.Size(shape).numel()].view(shape).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _fill(grads[0].reshape(-1), ctx.numel), None


def _fill(flat: Tensor, numel: int) -> Tensor:
    if flat.numel() == numel:
        return flat.detach()
    filled = flat.new_zeros(numel)
    filled[: flat.numel()] = flat
    return filled


def to_wire(value: Tensor, numel: int) -> Tensor:
    """``value`` flattened and filled up with zeros to ``numel`` elements, no view of it.

    ``PipelineStage`` detaches what it sent in place when a backward is split.
    """
    return _ToWire.apply(value, numel)  # type: ignore[no-any-return]


def from_wire(wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor of ``shape`` at the start of ``wire``."""
    return _FromWire.apply(wire, shape)  # type: ignore[no-any-return]


def hollow(wire: Tensor) -> None:
    """Let go of the memory of ``wire`` and keep what autograd asks of a leaf: its shape and ``.grad``.

    ``PipelineStage`` keeps every received tensor until its backward. What was read from the wire
    shares its storage, and now lives as long as it is needed itself.
    """
    wire.data = wire.new_empty(()).expand(wire.shape)
