"""A small and a large operation of every class, to be timed on a device of this machine.

Each method allocates tensors and returns the call to time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Call = Callable[[], Any]
_DRAWN = 2**16  # random numbers of a sample; larger ones repeat them, because drawing takes long
ROWS, ROW = 8, 2**19  # channels of a normalisation of few rows, and the elements of each


@dataclass(frozen=True, slots=True)
class Samples:
    """Makes samples on a device in a data type. ``scale`` 1 is for a few CPU cores, more for a GPU."""

    device: torch.device
    dtype: torch.dtype
    scale: float = 1

    def _x(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        drawn = torch.randn(min(size, _DRAWN), device=self.device).to(self.dtype)
        return drawn.repeat(-(-size // _DRAWN))[:size].view(shape)

    def convolution(self, part: str, *, large: bool) -> Call:
        """A convolution of 4 images with 3x3 kernels, or one of its gradients."""
        side = round(28 * self.scale**0.5) if large else 4
        channels = (128 if self.scale > 1 else 64) if large else 8
        x, w = self._x(4, channels, side, side), self._x(channels, channels, 3, 3)
        return lambda: _convolve(x, w, part)

    def large_weights(self, name: str, *, large: bool) -> Call:
        """Products of few rows, or convolutions of small images as `convolution` has them, in turn.

        Their weights are together larger than the caches of a CPU.
        """
        count = 8 if large else 1
        factor = min(self.scale, 1) ** 0.5
        if name == "product":
            side = 8 * round(256 * factor) if large else 16
            rows, weights = self._x(8, side), [self._x(side, side) for _ in range(count)]
            return lambda: [(rows @ weight, rows.t() @ rows) for weight in weights]
        channels = 8 * round(64 * factor) if large else 8
        x = self._x(2, channels, 2, 2)
        kernels = [self._x(channels, channels, 3, 3) for _ in range(count)]
        _, _, part = name.partition("_")
        return lambda: [_convolve(x, kernel, part) for kernel in kernels]

    def transposed(self, part: str, *, large: bool) -> Call:
        """A transposed convolution with kernels of 2 and a stride of 2, or one of its gradients."""
        edge = round(16 * self.scale ** (1 / 3)) if large else 2
        x, w = self._x(1, 64, edge, edge, edge), self._x(64, 32, 2, 2, 2)
        rest = ([2] * 3, [0] * 3, [1] * 3, True, [0] * 3, 1)
        if part == "forward":
            return lambda: aten.convolution.default(x, w, None, *rest)
        grad = self._x(1, 32, *[2 * edge] * 3)
        mask = [part == "input", part == "weight", False]
        return lambda: aten.convolution_backward.default(grad, x, w, None, *rest, mask)

    def depthwise(self, *, large: bool) -> Call:
        """A depthwise 3x3 convolution."""
        side = round(56 * self.scale**0.5) if large else 4
        x, w = self._x(4, 64, side, side), self._x(64, 1, 3, 3)
        return lambda: F.conv2d(x, w, padding=1, groups=64)

    def product(self, *, large: bool, uneven: bool = False) -> Call:
        """A product of square matrices; with ``uneven``, their size is not a multiple of 8."""
        size = (round(512 * self.scale ** (1 / 3)) if large else 16) + uneven
        a, b = self._x(size, size), self._x(size, size)
        return lambda: a @ b

    def attention(self, *, large: bool, backward: bool) -> Call:
        """Attention with 8 heads of 64 channels."""
        length = (256 if self.scale <= 1 else 1024) if large else 8
        batch = 1 if self.scale <= 1 else 8
        q, k, v = (self._x(batch, 8, length, 64).requires_grad_(backward) for _ in range(3))
        if not backward:
            return lambda: F.scaled_dot_product_attention(q, k, v)
        out = F.scaled_dot_product_attention(q, k, v)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    def image_operation(self, name: str, *, large: bool, backward: bool = False) -> Call:
        """An operation that reads and writes images: normalisation, pooling, upsampling, a sum, …"""
        side = round(64 * self.scale**0.5) if large else 4
        channels = 256 if large else 8
        x = self._x(4, channels, side, side)
        weight, bias = self._x(channels), self._x(channels)
        calls: Mapping[str, Callable[[Tensor], Any]] = {
            "batch_norm": lambda t: F.batch_norm(t, None, None, weight, bias, training=True),
            "group_norm": lambda t: F.group_norm(t, channels // 8, weight, bias),
            "layer_norm": lambda t: F.layer_norm(t, (side,), weight[:1].expand(side), None),
            "pooling": lambda t: F.max_pool2d(t, 2),
            "upsampling": lambda t: F.interpolate(t, scale_factor=2.0, mode="bilinear"),
            "reduction": lambda t: t.sum((0, 2, 3)),
            "copy": lambda t: t.clone(),
            "pointwise": lambda t: t * 2.0,
        }
        call = calls[name]
        if not backward:
            return lambda: call(x)
        x.requires_grad_()
        out = call(x)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, x, grad, retain_graph=True)

    def few_rows(self, *, large: bool, backward: bool) -> Call:
        """A normalisation of 8 channels, to measure what one block of a GPU reads and writes."""
        x = self._x(1, ROWS, ROW if large else 16)
        weight, bias = torch.ones(ROWS, device=self.device), torch.zeros(ROWS, device=self.device)
        if not backward:
            return lambda: F.batch_norm(x, None, None, weight, bias, training=True)
        x.requires_grad_()
        out = F.batch_norm(x, None, None, weight, bias, training=True)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, x, grad, retain_graph=True)

    def gather(self, *, large: bool) -> Call:
        """A lookup in a table of 1,024 rows."""
        rows = round(4096 * self.scale) if large else 4
        table = self._x(1024, 256)
        places = torch.randint(0, 1024, (rows,), device=self.device)
        return lambda: F.embedding(places, table)

    def optimizer(self, *, large: bool) -> Call:
        """A step of Adam, with parameters of `optimizer_nbytes` if it is the large one."""
        size = optimizer_nbytes(self.scale) // (_PARAMETERS * 4) if large else 64
        parameters = [
            torch.zeros(size, device=self.device, requires_grad=True) for _ in range(_PARAMETERS)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.optim.Adam(parameters).step


def _convolve(x: Tensor, weight: Tensor, part: str) -> Any:
    """A padded 3x3 convolution, or, if ``part`` is "input" or "weight", that gradient of it."""
    rest = ([1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1)
    if part not in ("input", "weight"):
        return aten.convolution.default(x, weight, None, *rest)
    mask = [part == "input", part == "weight", False]
    return aten.convolution_backward.default(x, x, weight, None, *rest, mask)


_PARAMETERS = 4


def optimizer_nbytes(scale: float) -> int:
    """Bytes of the parameters of the large step of Adam: more than the caches of a CPU hold."""
    return _PARAMETERS * 4 * round(2**22 * min(scale, 4))
