"""Result shapes of the operators that occur with most shapes, without torch's fake kernels of 1 to 15 ms.

Unless all tensors have the same floating-point type, a rule returns None and torch's fake kernel runs. Most
rules are for contiguous tensors only. `tests/program/test_fake_mode.py` compares every rule with
torch's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A new tensor on the CPU with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


Recipe = tuple[bool, tuple[NewTensor | int | None, ...]]
"""How to make an operator's results: whether they are a tuple, and for each result the tensor to make, the
position of the argument that it is, or None."""

_FLOATS = (torch.float32, torch.float64)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _new(shape: Sequence[int], dtype: torch.dtype) -> NewTensor:
    return NewTensor(tuple(shape), _strides(shape), dtype)


def _single(made: NewTensor | None) -> Recipe:
    return False, (made,)


def _are_dense(*tensors: Tensor) -> bool:
    """Are they all contiguous, not empty, and of one floating type?"""
    dtype = tensors[0].dtype
    return dtype in _FLOATS and all(
        x.dtype == dtype and x.stride() == _strides(x.shape) and 0 not in x.shape for x in tensors
    )


def _elementwise(*args: Any, **kwargs: Any) -> Recipe | None:
    """An elementwise operator on tensors that broadcast to the shape of one of them, and real numbers."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if any(isinstance(x, complex) for x in args) or not _are_dense(*tensors):
        return None
    shapes = {x.shape for x in tensors}
    whole = [s for s in shapes if all(_broadcasts(other, s) for other in shapes)]
    # With a dimension of size 1, the memory format of a broadcast result is ambiguous.
    if not whole or (len(shapes) > 1 and 1 in whole[0]):
        return None
    return _single(_new(whole[0], tensors[0].dtype))


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Does a tensor of ``shape`` broadcast to the shape ``to``?"""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, wanted) for n, wanted in pairs)


def _written(x: Tensor, *args: Any, **kwargs: Any) -> Recipe | None:
    """An elementwise operator that writes to ``x`` from tensors that broadcast to its shape, and numbers."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    overlaps = any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True))
    if overlaps or any(isinstance(value, complex) for value in args):
        return None
    if x.dtype not in _FLOATS or any(tensor.dtype != x.dtype for tensor in tensors):
        return None
    return (False, (0,)) if all(_broadcasts(y.shape, x.shape) for y in tensors) else None


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Recipe | None:
    if not _are_dense(bias, a) or (a.dim(), b.dim(), bias.dim()) != (2, 2, 1):
        return None
    if a.dtype != b.dtype or a.shape[1] != b.shape[0] or bias.shape[0] != b.shape[1]:
        return None
    return _single(_new((a.shape[0], b.shape[1]), a.dtype))


def _like(x: Tensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Recipe | None:
    """A tensor of the same shape, perhaps of another type."""
    wanted = x.dtype if dtype is None else dtype
    plain = (None, False, torch.strided, torch.preserve_format)
    if not _are_dense(x) or wanted not in _FLOATS or device not in (None, torch.device("cpu")):
        return None
    return _single(_new(x.shape, wanted)) if all(v in plain for v in kwargs.values()) else None


def _sum(
    x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None
) -> Recipe | None:
    if not _are_dense(x) or not dims or dtype not in (None, x.dtype):
        return None
    if not all(-x.dim() <= d < x.dim() for d in dims):
        return None
    gone = {d % x.dim() for d in dims}
    if len(gone) != len(dims):
        return None
    sizes = [1 if i in gone else n for i, n in enumerate(x.shape)]
    shape = sizes if keepdim else [n for i, n in enumerate(x.shape) if i not in gone]
    return _single(_new(shape, x.dtype))


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Recipe | None:
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    dims = weight.dim() - 2
    if (
        transposed
        or not _are_dense(*given)
        or x.dim() != weight.dim()
        or not _is_not_channels_last(x, weight)
    ):
        return None
    if any(len(setting) != dims for setting in (stride, padding, dilation)):
        return None
    if x.shape[1] != weight.shape[1] * groups or (bias is not None and bias.dim() != 1):
        return None
    sizes = [
        (n + 2 * pad - step * (k - 1) - 1) // hop + 1
        for n, k, hop, pad, step in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    if min(sizes) < 1:
        return None
    return _single(_new((x.shape[0], weight.shape[0], *sizes), x.dtype))


def _is_not_channels_last(*tensors: Tensor) -> bool:
    """Are their strides unlike those of channels-last tensors?"""
    return all(x.shape[1] > 1 and max(x.shape[2:], default=1) > 1 for x in tensors)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Recipe | None:
    """In training: the result, and the mean and the reciprocal standard deviation of each channel."""
    given = [tensor for tensor in (weight, bias, mean, variance) if tensor is not None]
    if not training or not _are_dense(x, *given) or x.dim() < 3 or not _is_not_channels_last(x):
        return None
    if any(tensor.shape != x.shape[1:2] for tensor in given):
        return None
    channels = _new(x.shape[1:2], x.dtype)
    return True, (_new(x.shape, x.dtype), channels, channels)


def _cudnn_batch_norm_backward(
    x: Tensor, grad: Tensor, weight: Tensor, *args: Any
) -> Recipe | None:
    if (
        not _are_dense(x, grad, weight)
        or x.shape != grad.shape
        or x.dim() < 3
        or not _is_not_channels_last(x)
    ):
        return None
    channels = _new(weight.shape, x.dtype)
    return True, (_new(x.shape, x.dtype), channels, channels)


def _matching_lists(*args: Any, alpha: float = 1.0) -> Sequence[Tensor] | None:
    """The first list of tensors, if the other lists have tensors of the same shapes, or numbers."""
    lists = [x for x in args if isinstance(x, list)]
    numbers = [alpha, *(x for x in args if not isinstance(x, list))]
    if len({len(x) for x in lists}) != 1:
        return None
    for first, *others in zip(*lists, strict=True):
        tensors = [x for x in others if isinstance(x, Tensor)]
        numbers += [x for x in others if not isinstance(x, Tensor)]
        if not _are_dense(first, *tensors) or any(x.shape != first.shape for x in tensors):
            return None
    return lists[0] if all(isinstance(x, int | float) for x in numbers) else None


def _write_lists(*args: Any, **kwargs: Any) -> Recipe | None:
    """An operator that writes to the tensors of the first list and returns nothing."""
    return None if _matching_lists(*args, **kwargs) is None else _single(None)


def _make_list(*args: Any) -> Recipe | None:
    found = _matching_lists(*args)
    return None if found is None else (True, tuple(_new(x.shape, x.dtype) for x in found))


aten = torch.ops.aten
_ELEMENTWISE = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar,
    aten.div.Scalar, aten.neg.default, aten.relu.default, aten.threshold_backward.default,
    aten.gelu.default, aten.gelu_backward.default, aten.silu.default, aten.silu_backward.default,
    aten.sigmoid.default, aten.sigmoid_backward.default, aten.tanh.default,
    aten.tanh_backward.default,
)  # fmt: skip
_WRITES = (
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.copy_.default,
    aten.fill_.Scalar, aten.zero_.default, aten.relu_.default, aten.bernoulli_.float,
)  # fmt: skip
SHAPE_RULES: dict[Any, Callable[..., Recipe | None]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_WRITES, _written),
    aten.addmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    aten._to_copy.default: _like,
    aten.zeros_like.default: _like,
    aten.sum.dim_IntList: _sum,
}
# Operators that optimizers call on all parameters at once; cache keys for such lists would be slower.
LIST_RULES: dict[Any, Callable[..., Recipe | None]] = {
    **dict.fromkeys(
        (
            aten._foreach_add_.Scalar,
            aten._foreach_add_.List,
            aten._foreach_mul_.Scalar,
            aten._foreach_div_.ScalarList,
            aten._foreach_lerp_.Scalar,
            aten._foreach_addcmul_.Scalar,
            aten._foreach_addcdiv_.ScalarList,
        ),
        _write_lists,
    ),
    aten._foreach_sqrt.default: _make_list,
}
