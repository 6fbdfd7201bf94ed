"""A convolution of several tensors side by side in the channels, in chunks of planes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from placer.program import is_torch_leaf, must_stay_whole
from placer.space.windows import Axis, Window, window

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_PLANES = 2  # the first spatial dimension, of which chunks have planes


def is_chunkable(module: nn.Module) -> bool:
    """Is it a convolution of torch with zeros for padding, and nothing that must run when it is called?"""
    return (
        type(module) in CONVOLUTIONS
        and is_torch_leaf(module)
        and not must_stay_whole(module)
        and getattr(module, "padding_mode", "") == "zeros"
        and _padding(module) is not None
    )


class ChunkedConvolution:
    """Calls a convolution with ``torch.cat(parts, 1)``, which is never made, in ``count`` chunks of planes.

    Only a chunk of the parts is side by side at a time, in forward and in backward; for backward the parts
    are kept. So a step needs neither the concatenation nor its gradient at any time. Results differ from
    those of the module by rounding. A module that is no such convolution any more, because it was given hooks
    or parametrizations, is called with the concatenation; so is one that gets no batch, where dim 1 is space.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.__name__ = self.__qualname__ = f"convolution_in_{count}_chunks"
        self.__module__ = __name__

    def __call__(self, module: Any, /, *parts: Tensor) -> Tensor:
        if not is_chunkable(module) or parts[0].dim() != len(module.kernel_size) + _PLANES:
            result: Tensor = module(torch.cat(parts, 1))
            return result
        device = parts[0].device.type
        given: list[Any] = [module.weight, module.bias, *parts]
        if torch.is_autocast_enabled(device):  # cast here, so that backward keeps what was cast
            dtype = torch.get_autocast_dtype(device)
            given = [x if x is None else x.to(dtype) for x in given]
        with torch.autocast(device, enabled=False):
            made: Tensor = _Convolution.apply(_Geometry(module, parts), self.count, *given)
        return made

    def __repr__(self) -> str:
        return f"ChunkedConvolution({self.count})"


class _Geometry:
    """The integers of a convolution of ``module`` with ``parts``, and how to run a chunk of it."""

    def __init__(self, module: Any, parts: Sequence[Tensor]) -> None:
        self.transposed: bool = module.transposed
        self.stride, self.dilation, self.groups = module.stride, module.dilation, module.groups
        padding = _padding(module)
        assert padding is not None
        lengths = parts[0].shape[_PLANES:]
        self.axis = Axis(
            length=lengths[0],
            kernel=module.kernel_size[0],
            stride=self.stride[0],
            padding=padding[0],
            dilation=self.dilation[0],
            transposed=self.transposed,
        )
        self.padding = (0, *padding[1:])  # of the planes, the window has it
        self.extra = tuple(module.output_padding)
        self.channels = [part.size(1) for part in parts]
        self.planes = _output_length(self.axis, self.extra[0])

    def chunks(self, count: int) -> Iterator[tuple[int, int, Window]]:
        """The intervals of the output, none empty, and the window of each."""
        count = min(count, self.planes)
        ends = [self.planes * i // count for i in range(count + 1)]
        return (
            (first, end, window(self.axis, first, end)) for first, end in itertools.pairwise(ends)
        )

    def side_by_side(self, parts: Sequence[Tensor], own: Window) -> Tensor:
        """The planes of the concatenation that a chunk reads, with its padding."""
        first = min(max(own.first, 0), own.end)  # planes before 0 are padding
        length = max(0, min(own.end, self.axis.length) - max(first, 0))
        inside = [part.narrow(_PLANES, first if length else 0, length) for part in parts]
        chunk = torch.cat(inside, 1)
        before = first - own.first
        after = own.end - first - length
        if not (before or after):
            return chunk
        rest = (0, 0) * (chunk.dim() - _PLANES - 1)
        return F.pad(chunk, (*rest, before, after))

    def arguments(self, own: Window) -> tuple[Any, ...]:
        """The last arguments of ``torch.convolution`` for a chunk."""
        extra = (own.extra, *self.extra[1:])
        return self.stride, self.padding, self.dilation, self.transposed, extra, self.groups


class _Convolution(torch.autograd.Function):
    """`ChunkedConvolution` with the weights and parts as arguments: it saves these, and no concatenation."""

    @staticmethod
    def forward(
        ctx: Any,
        geometry: _Geometry,
        count: int,
        weight: Tensor,
        bias: Tensor | None,
        *parts: Tensor,
    ) -> Tensor:
        ctx.geometry, ctx.count = geometry, count
        ctx.bias_sizes = None if bias is None else [bias.numel()]
        ctx.save_for_backward(weight, *parts)
        result: Tensor | None = None
        for first, end, own in geometry.chunks(count):
            chunk = geometry.side_by_side(parts, own)
            made = torch.convolution(chunk, weight, bias, *geometry.arguments(own))
            del chunk
            made = made.narrow(_PLANES, own.skip, end - first)
            if result is None:
                shape = (*made.shape[:_PLANES], geometry.planes, *made.shape[_PLANES + 1 :])
                result = made.new_empty(shape)
            result.narrow(_PLANES, first, end - first).copy_(made)
            del made
        assert result is not None, "a convolution has output"
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        geometry: _Geometry = ctx.geometry
        weight, *parts = ctx.saved_tensors
        _, _, of_weight, of_bias, *of_parts = ctx.needs_input_grad
        wanted = [any(of_parts), of_weight, of_bias]
        found = [
            torch.zeros_like(x) if asked else None for x, asked in zip(parts, of_parts, strict=True)
        ]
        sums: list[Tensor | None] = [None, None]
        for first, end, own in geometry.chunks(ctx.count):
            chunk = geometry.side_by_side(parts, own)
            dy = _uncropped(gradient.narrow(_PLANES, first, end - first), geometry, own)
            dx, *others = torch.ops.aten.convolution_backward(
                dy, chunk, weight, ctx.bias_sizes, *geometry.arguments(own), wanted
            )
            del chunk, dy
            sums = [
                new if old is None else old if new is None else old + new
                for old, new in zip(sums, others, strict=True)
            ]
            if dx is not None:
                _add_planes(found, dx, geometry, own)
            del dx, others
        return None, None, *sums, *found


def _uncropped(gradient: Tensor, geometry: _Geometry, own: Window) -> Tensor:
    """The gradient of all planes that a chunk makes; zero for those that are dropped."""
    if not geometry.transposed:
        return gradient.contiguous()
    axis = geometry.axis
    made = (own.end - own.first - 1) * axis.stride + axis.reach + 1 + own.extra
    after = made - own.skip - gradient.size(_PLANES)
    rest = (0, 0) * (gradient.dim() - _PLANES - 1)
    return F.pad(gradient, (*rest, own.skip, after))


def _add_planes(
    found: Sequence[Tensor | None], dx: Tensor, geometry: _Geometry, own: Window
) -> None:
    """Add a chunk's gradient to those of the parts, without its padding."""
    first, end = max(own.first, 0), min(own.end, geometry.axis.length)
    if first >= end:
        return
    inside = dx.narrow(_PLANES, first - own.first, end - first)
    for whole, part in zip(found, inside.split(geometry.channels, 1), strict=True):
        if whole is not None:
            whole.narrow(_PLANES, first, end - first).add_(part)


def _output_length(axis: Axis, extra: int) -> int:
    if axis.transposed:
        return (axis.length - 1) * axis.stride - 2 * axis.padding + axis.reach + 1 + extra
    return (axis.length + 2 * axis.padding - axis.reach - 1) // axis.stride + 1


def _padding(module: Any) -> tuple[int, ...] | None:
    """The planes of padding on either side, per dimension; None if the two sides differ."""
    if not isinstance(module.padding, str):
        return tuple(module.padding)
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    reach = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return None if any(r % 2 for r in reach) else tuple(r // 2 for r in reach)
