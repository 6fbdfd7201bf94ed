"""Which part of its input does a part of a convolution's output read? Integers only, no tensors.

An interval ``[first, end)`` counts planes of one spatial dimension. Everything follows from the output: the
input is not cut first and then widened by half a kernel, which is wrong for strides larger than 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A convolution along one spatial dimension, by the names of ``torch.nn.Conv3d``."""

    length: int  # of the input
    kernel: int
    stride: int
    padding: int
    dilation: int
    transposed: bool = False

    @property
    def reach(self) -> int:
        """The distance of the first and the last position of the kernel."""
        return self.dilation * (self.kernel - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How to compute an interval of the output from an interval of the input.

    Read the planes ``[first, end)`` of the input, of which those below 0 and beyond its length are padding.
    Run the operator on them without padding of its own, with ``extra`` planes at the end that only the bias
    reaches. Drop the first ``skip`` planes of the result, and what follows the interval.
    """

    first: int
    end: int
    skip: int = 0
    extra: int = 0


def window(axis: Axis, first: int, end: int) -> Window:
    """The window for the planes ``[first, end)`` of the output, of which there is at least one.

    >>> axis = Axis(length=8, kernel=3, stride=2, padding=1, dilation=1)
    >>> window(axis, 1, 3)
    Window(first=1, end=6, skip=0, extra=0)
    """
    if axis.transposed:
        return _transposed(axis, first, end)
    start = first * axis.stride - axis.padding
    return Window(first=start, end=(end - 1) * axis.stride - axis.padding + axis.reach + 1)


def _transposed(axis: Axis, first: int, end: int) -> Window:
    """Input plane i adds to output plane ``i * stride - padding``, and up to ``reach`` planes further."""
    stride, last = axis.stride, axis.length - 1
    # The last input plane that begins up to ``first``
    begins_before = (first + axis.padding) // stride
    # The first input plane that reaches it
    reaches = -((axis.reach - first - axis.padding) // stride)
    low = max(0, min(reaches, begins_before, last))
    high = max(min((end - 1 + axis.padding) // stride, last), low) + 1
    begins = low * stride - axis.padding
    made = (high - low - 1) * stride + axis.reach + 1
    return Window(first=low, end=high, skip=first - begins, extra=max(0, end - begins - made))
