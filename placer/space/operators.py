"""The operators that look at neighbours in space: which input a part of the output reads, and how to run it.

All follow from the part of the output; an operator never pads a cut dimension itself, because at a cut there
is no border. Spans and shapes here have the spatial dimensions only, which come after rows and channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.space.layout import Box
from placer.space.windows import Axis, Window, window

FIRST = 2
"""The first spatial dimension of a tensor: after its rows and channels."""
Gradients = tuple[Tensor | None, Sequence[Tensor | None]]


class Operator:
    """An operator on one tensor, with parameters. Where it reads outside of that, it reads ``fill``."""

    fill = 0.0  # what padding is filled with
    wraps: tuple[int, ...] = ()  # dimensions that go on with the other end where it reads outside
    is_linear = False  # is the gradient of the input the same for every input, without parameters?

    def source(self, out: Box) -> Box:
        """The spans of the input that the non-empty part ``out`` of the output reads, padding included."""
        raise NotImplementedError

    def run(self, x: Tensor, out: Box, parameters: Sequence[Tensor | None]) -> Tensor:
        """The part ``out`` of the output; ``x`` is the input at ``source(out)``."""
        raise NotImplementedError

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        out: Box,
        parameters: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> Gradients:
        """The gradients of ``x`` and of the parameters; ``wanted`` says of which.

        Without parameters, they are found by running the operator again.
        """
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            made = self.run(leaf, out, parameters)
        (found,) = torch.autograd.grad(made, leaf, dy)
        return found, ()


@dataclass(frozen=True)
class Convolution(Operator):
    """A convolution, or a transposed one, by the names of ``torch.nn.Conv3d``.

    ``lengths`` are those of the input; ``cut`` says which of the dimensions are cut, so that the window has
    their padding.
    """

    lengths: tuple[int, ...]
    cut: tuple[bool, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    def _window(self, dim: int, out: Box) -> Window:
        axis = Axis(
            length=self.lengths[dim],
            kernel=self.kernel[dim],
            stride=self.stride[dim],
            padding=self.padding[dim],
            dilation=self.dilation[dim],
            transposed=self.transposed,
        )
        return window(axis, *out[dim])

    def source(self, out: Box) -> Box:
        found = []
        for dim, (length, is_cut) in enumerate(zip(self.lengths, self.cut, strict=True)):
            own = self._window(dim, out) if is_cut else None
            found.append((0, length) if own is None else (own.first, own.end))
        return tuple(found)

    def _arguments(self, out: Box) -> tuple[Any, ...]:
        padding = [0 if cut else p for cut, p in zip(self.cut, self.padding, strict=True)]
        extra = [
            self._window(dim, out).extra if cut else extra
            for dim, (cut, extra) in enumerate(zip(self.cut, self.output_padding, strict=True))
        ]
        return self.stride, padding, self.dilation, self.transposed, extra, self.groups

    def _skipped(self, out: Box) -> list[tuple[int, int, int]]:
        """Dimension, first position and length of what is taken of what a transposed convolution makes."""
        if not self.transposed:
            return []
        cut = (dim for dim, is_cut in enumerate(self.cut) if is_cut)
        return [
            (FIRST + dim, self._window(dim, out).skip, out[dim][1] - out[dim][0]) for dim in cut
        ]

    def run(self, x: Tensor, out: Box, parameters: Sequence[Tensor | None]) -> Tensor:
        weight, bias = parameters
        assert weight is not None
        made = torch.convolution(x, weight, bias, *self._arguments(out))
        for dim, first, length in self._skipped(out):
            made = made.narrow(dim, first, length)
        return made

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        out: Box,
        parameters: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> Gradients:
        weight, bias = parameters
        assert weight is not None
        for dim, first, length in self._skipped(out):
            own = self._window(dim - FIRST, out)
            reach = self.dilation[dim - FIRST] * (self.kernel[dim - FIRST] - 1)
            made = (own.end - own.first - 1) * self.stride[dim - FIRST] + reach + 1 + own.extra
            before_last = (0, 0) * (dy.dim() - dim - 1)
            dy = F.pad(dy, (*before_last, first, made - first - length))
        dx, *others = torch.ops.aten.convolution_backward(
            dy.contiguous(),
            x,
            weight,
            None if bias is None else [bias.numel()],
            *self._arguments(out),
            [wanted[0], wanted[1], bias is not None and wanted[2]],
        )
        return dx, others


@dataclass(frozen=True)
class Pool(Operator):
    """Max or average pooling, in windows in all dimensions, so that no rounding mode needs a case of its own.

    An average is a sum over the window, divided by the number of positions that torch counts.
    """

    lengths: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    average: bool
    include_pad: bool = True
    divisor: int | None = None

    @property
    def fill(self) -> float:  # type: ignore[override]
        return 0.0 if self.average else -math.inf

    @property
    def is_linear(self) -> bool:  # type: ignore[override]
        return self.average

    def source(self, out: Box) -> Box:
        return tuple(
            (first * stride - padding, (end - 1) * stride - padding + dilation * (kernel - 1) + 1)
            for (first, end), kernel, stride, padding, dilation in zip(
                out, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    def run(self, x: Tensor, out: Box, parameters: Sequence[Tensor | None]) -> Tensor:
        dims = len(self.kernel)
        if not self.average:
            pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
            made: Tensor = pool(x, self.kernel, self.stride, 0, self.dilation)
            return made
        average: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        mean = average(x, self.kernel, self.stride)
        if self.divisor is not None:
            scaled: Tensor = mean * (math.prod(self.kernel) / self.divisor)
            return scaled
        for dim, span in enumerate(out):
            counts = self._counts(dim, span)
            if set(counts) == {self.kernel[dim]}:
                continue
            shape = [-1 if i == dim else 1 for i in range(dims)]
            share = [self.kernel[dim] / count for count in counts]
            mean = mean * mean.new_tensor(share).view(shape)
        found: Tensor = mean
        return found

    def _counts(self, dim: int, span: tuple[int, int]) -> list[int]:
        """How many positions the average of each output counts along ``dim``."""
        length, padding = self.lengths[dim], self.padding[dim]
        found: list[int] = []
        for position in range(*span):
            first = position * self.stride[dim] - padding
            end = min(first + self.kernel[dim], length + padding)
            inside = min(end, length) - max(first, 0)
            found.append(end - first if self.include_pad else inside)
        return found


@dataclass(frozen=True)
class Resize(Operator):
    """Interpolation, one dimension after the other: cut ones by positions in the whole value.

    A local call of ``interpolate`` with local lengths would be wrong where a factor is no integer, and with
    ``align_corners``. ``factors`` are those that the caller gave, None for each dimension with a size.
    """

    lengths: tuple[int, ...]
    outputs: tuple[int, ...]
    cut: tuple[bool, ...]
    nearest: bool
    align_corners: bool
    factors: tuple[float | None, ...]

    is_linear = True

    def source(self, out: Box) -> Box:
        found = []
        for dim, span in enumerate(out):
            if self.cut[dim]:
                read = self._reads(dim, span)
                found.append((read[0][0], read[-1][1] + 1))
            else:
                found.append((0, self.lengths[dim]))
        return tuple(found)

    def _reads(self, dim: int, span: tuple[int, int]) -> list[tuple[int, int, float]]:
        """For each output the two positions that it is between, and the weight of the second."""
        length, output, factor = self.lengths[dim], self.outputs[dim], self.factors[dim]
        scale = 1 / factor if factor else length / output
        found: list[tuple[int, int, float]] = []
        for position in range(*span):
            if self.nearest:
                at = min(int(position * scale), length - 1)
                found.append((at, at, 0.0))
                continue
            if self.align_corners:
                exact = position * (length - 1) / (output - 1) if output > 1 else 0.0
            else:
                exact = max((position + 0.5) * scale - 0.5, 0.0)
            first = min(int(exact), length - 1)
            found.append((first, min(first + 1, length - 1), exact - first))
        return found

    def run(self, x: Tensor, out: Box, parameters: Sequence[Tensor | None]) -> Tensor:
        start = self.source(out)
        for dim, span in enumerate(out):
            if not self.cut[dim]:
                continue
            first, second, weights = zip(*self._reads(dim, span), strict=True)
            low = self._at(x, dim, first, start)
            if self.nearest:
                x = low
                continue
            shape = [-1 if i == dim else 1 for i in range(len(out))]
            weight = x.new_tensor(weights).view(shape)
            x = torch.lerp(low, self._at(x, dim, second, start), weight.expand_as(low))
        rest = [
            x.size(FIRST + dim) if cut else size
            for dim, (cut, size) in enumerate(zip(self.cut, self.outputs, strict=True))
        ]
        if list(x.shape[FIRST:]) == rest:
            return x
        mode = "nearest" if self.nearest else ("linear", "bilinear", "trilinear")[len(rest) - 1]
        options: Any = {} if self.nearest else {"align_corners": self.align_corners}
        return F.interpolate(x, rest, mode=mode, **options)

    def _at(self, x: Tensor, dim: int, positions: Sequence[int], start: Box) -> Tensor:
        own = [position - start[dim][0] for position in positions]
        return x.index_select(FIRST + dim, torch.tensor(own, device=x.device))


@dataclass(frozen=True)
class Take(Operator):
    """A slice, or padding: position ``i`` of the output is ``first + i * step`` of the input.

    Where that is outside of the input, it is ``fill``, or by ``mode`` ("reflect", "replicate", "circular")
    one inside. ``wraps`` are the dimensions of which windows have that: those that are cut, if circular.
    """

    lengths: tuple[int, ...]
    first: tuple[int, ...]
    step: tuple[int, ...]
    mode: str = "constant"
    fill: float = 0.0
    wraps: tuple[int, ...] = ()

    is_linear = True  # its gradient is that of a linear one, whatever is filled in

    def _positions(self, dim: int, span: tuple[int, int]) -> list[int]:
        length = self.lengths[dim]
        found = [self.first[dim] + i * self.step[dim] for i in range(*span)]
        if self.mode == "replicate":
            return [min(max(at, 0), length - 1) for at in found]
        if self.mode == "circular" and FIRST + dim not in self.wraps:
            return [at % length for at in found]
        if self.mode == "reflect":
            return [length - 1 - abs(length - 1 - abs(at)) for at in found]
        return found

    def source(self, out: Box) -> Box:
        read = [self._positions(dim, span) for dim, span in enumerate(out)]
        return tuple((min(own), max(own) + 1) for own in read)

    def run(self, x: Tensor, out: Box, parameters: Sequence[Tensor | None]) -> Tensor:
        for dim, span in enumerate(out):
            positions = self._positions(dim, span)
            first, end, step = min(positions), max(positions) + 1, self.step[dim]
            if positions == list(range(first, end, step)):
                x = x[(slice(None),) * (FIRST + dim) + (slice(None, None, step),)]
            else:
                own = torch.tensor([at - first for at in positions], device=x.device)
                x = x.index_select(FIRST + dim, own)
        return x


def chunks(out: Box, dim: int, count: int) -> list[Box]:
    """``out`` in at most ``count`` parts along ``dim``, none of them empty."""
    first, end = out[dim]
    count = max(1, min(count, end - first))
    ends = [first + (end - first) * i // count for i in range(count + 1)]
    return [(*out[:dim], span, *out[dim + 1 :]) for span in itertools.pairwise(ends)]
