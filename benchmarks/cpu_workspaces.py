"""Workspaces of CPU kernels: memory that they allocate and free within one call.

Plans do not count it. Dry runs count it in a block of `counting_workspaces`, so that they can be compared
with the events of the CPU's allocator (`benchmarks.allocator`).

A dispatch mode sees the arguments and results of an operator, but not this memory. Each formula below
gives the most bytes that an ATen kernel has allocated at a time beyond arguments and results, and names the
file under ``aten/src/ATen/native`` that allocates them. The formulas were checked against the allocator's
events with torch 2.15 (tests/benchmarks). They leave out small allocations, such as a row of weights or a
table of indices, and what oneDNN takes inside a convolution, a matrix product in half precision or an LSTM,
which depends on the processor's instructions. CUDA kernels allocate none of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from placer.operands import nbytes_of
from placer.simulation.ledger import Ledger

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLOAT_NBYTES = 4
_SMALL_IMAGE = 128  # height and width together


@contextmanager
def counting_workspaces() -> Iterator[None]:
    """In this block dry runs count the workspaces of CPU kernels."""

    def count(ledger: Ledger, *call: Any) -> int:
        return workspace_nbytes(*call)

    with mock.patch.object(Ledger, "temporary_nbytes", count):
        yield


def workspace_nbytes(op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """The most bytes that ``op`` has allocated on the CPU during its call, beyond arguments and ``result``.

    >>> x = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    >>> workspace_nbytes(aten.mean.default, (x,), {}, x.mean())  # a copy of x and the sum, in fp32
    100
    >>> workspace_nbytes(aten.relu.default, (x,), {}, x)
    0
    """
    formula = _FORMULAS.get(op)
    return 0 if formula is None else formula(result, *args, **kwargs)


def _copies(*tensors: Tensor) -> int:
    """Bytes of contiguous copies of those tensors that are not contiguous."""
    return sum(nbytes_of(t) for t in tensors if not t.is_contiguous())


def _memory_format(x: Tensor) -> torch.memory_format | None:
    """The memory format in which ``x`` is dense, or None."""
    if x.is_contiguous():
        return torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return last if last is not None and x.is_contiguous(memory_format=last) else None


def _batch_norm_backward(result: Any, grad: Tensor, x: Tensor, *others: Any, **_: Any) -> int:
    """Normalization.cpp: the input's gradient is allocated a second time before the first is freed."""
    dense = _memory_format(x)
    wanted = others[-1][0]
    return nbytes_of(x) if wanted and dense is not None and dense == _memory_format(grad) else 0


def _contiguous_copy(result: Any, x: Tensor, *_: Any, **__: Any) -> int:
    """layer_norm.cpp, SoftMax.cpp: a contiguous copy of the input."""
    return _copies(x)


def _contiguous_copies(result: Any, grad: Tensor, saved: Tensor, *_: Any, **__: Any) -> int:
    """The same files, and cpu/layer_norm_kernel.cpp: contiguous copies of gradient and saved tensor."""
    return _copies(grad, saved)


def _mean(result: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    """ReduceOps.cpp: for a mean in half precision, a copy of the input and the sum, both in fp32."""
    return _in_fp32(x, result) if result.dtype in _HALF else _cast(x, result)


def _sum(result: Tensor, x: Tensor, dims: Any = None, *_: Any, **__: Any) -> int:
    """ReduceOps.cpp (``should_use_acc_buffer``): the same if the sum is along more than one stride."""
    if result.dtype in _HALF and x.dtype in _HALF and _strides_summed(x, dims or ()) > 1:
        return _in_fp32(x, result)
    return _cast(x, result)


def _in_fp32(*tensors: Tensor) -> int:
    return _FLOAT_NBYTES * sum(t.numel() for t in tensors)


def _cast(x: Tensor, result: Tensor) -> int:
    return x.numel() * result.element_size() if x.dtype != result.dtype else 0


def _strides_summed(x: Tensor, dims: Sequence[int]) -> int:
    """The number of strides that a kernel sums along; dimensions adjacent in memory count once."""
    chosen = [d for d in dims if x.size(d) > 1]
    steps = sorted((x.stride(d), x.size(d)) for d in chosen)
    joined = sum(a * n == b for (a, n), (b, _) in itertools.pairwise(steps))
    return len(steps) - joined


def _logsumexp(result: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    """ReduceOps.cpp: the exponentials and the maxima."""
    return nbytes_of(x, result)


def _binary(result: Tensor, x: Any, y: Any, *_: Any, **__: Any) -> int:
    """TensorIterator.cpp: copies of the operands, and of the result, in the common type."""
    operands = [t for t in (x, y) if isinstance(t, Tensor)]
    common = torch.promote_types(result.dtype, torch.result_type(x, y))
    return sum(t.numel() * common.itemsize for t in (*operands, result) if t.dtype != common)


def _where(result: Tensor, _: Tensor, x: Tensor, y: Tensor, **__: Any) -> int:
    return _binary(result, x, y)


def _safe_softmax(result: Tensor, x: Tensor, dim: int, *_: Any, **__: Any) -> int:
    """transformers/attention.cpp: booleans for masked elements and for rows that are masked entirely."""
    return x.numel() + x.numel() // max(1, x.size(dim))


def _attention(
    result: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **_: Any
) -> int:
    """transformers/attention.cpp: first the projection and its three parts, then the parts and the scores."""
    heads = others[1]
    parts = 3 * nbytes_of(query)
    scores: int = query.size(0) * heads * query.size(1) * key.size(1) * query.element_size()
    return max(2 * parts, parts + scores) - nbytes_of(query)


def _upsample_nearest(result: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    """cpu/UpSampleKernel.cpp: for a small image, channels-last copies of input and result."""
    small = result.size(-1) + result.size(-2) <= _SMALL_IMAGE
    return _channels_last_copies(x, result) if small else 0


def _upsample_bilinear(result: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    """cpu/UpSampleKernel.cpp: the same, and for an image of three channels."""
    colours = x.size(1) == 3
    return _channels_last_copies(x, result) if colours else _upsample_nearest(result, x)


def _channels_last_copies(*images: Tensor) -> int:
    return sum(
        nbytes_of(t) for t in images if not t.is_contiguous(memory_format=torch.channels_last)
    )


_BINARY = ("add", "sub", "mul", "div")
_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _contiguous_copy,
    aten.native_layer_norm_backward.default: _contiguous_copies,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.logsumexp.default: _logsumexp,
    **{getattr(aten, name).Tensor: _binary for name in _BINARY},
    **{getattr(aten, f"{name}_").Tensor: _binary for name in _BINARY},
    aten.where.self: _where,
    aten._softmax.default: _contiguous_copy,
    aten._log_softmax.default: _contiguous_copy,
    aten._softmax_backward_data.default: _contiguous_copies,
    aten._log_softmax_backward_data.default: _contiguous_copies,
    aten._safe_softmax.default: _safe_softmax,
    aten._native_multi_head_attention.default: _attention,
    aten.upsample_nearest2d.default: _upsample_nearest,
    aten.upsample_bilinear2d.default: _upsample_bilinear,
}
