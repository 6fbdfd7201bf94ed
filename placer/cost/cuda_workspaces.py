"""Workspaces of CUDA kernels: memory that they use while they run, beyond arguments and results.

A dispatch mode does not see this memory. The rules below describe one H100 (torch 2.11, cuDNN 9.19, and
TF32 for convolutions, which is the default). Other GPUs may differ. They are compared with the measurements
that they were made from in benchmarks/results/reserved.md, and with those of another GPU in memory_gpu.md.

Convolutions: cuDNN's fast kernels need channels-last tensors, so cuDNN copies input, output and weights
into its workspace unless a kernel can use the tensors as they are. These workspaces are elastic: with less
memory, cuDNN chooses a slower kernel that needs less. No kernel with dilation or groups was measured by
itself, so for those all copies are counted. (Without that, the bytes reserved for MONAI's HighResNet at 96³,
whose kernels for 64 channels have a dilation of 4, were predicted 8.8 % too low. With the copies of their
results they are 0.3 % too low.)

Efficient attention: the backward accumulates the query's gradient in tiles.

Sums over rows, such as a bias's gradient: partial sums, by the formula of torch's kernel.

Matrix products: cuBLAS allocates one workspace (`BLAS_NBYTES`) and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer.operands import nbytes_of

aten = torch.ops.aten

# cuBLAS's own workspace (``getChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``):
# 32 MiB on Hopper and later, 8.1 MiB on earlier GPUs; we count 32 MiB for all.
BLAS_NBYTES = 32 * 2**20
_FEW_CHANNELS = 4  # with fewer input channels, the gradient has its own kernel
_DIRECT_CHANNELS = 64  # output channels that 3D kernels in fp32 write without a copy
_ALIGNMENT = 16  # bytes
_FP32_NBYTES = 4
_PADDED_NBYTES = 4  # channels of smaller elements are padded in forward and both gradients
_CONV2D_DIMS, _CONV3D_DIMS = 4, 5  # dimensions of the weights of 2D and 3D convolutions
_CONV2D_SPLITS = 64
_SPLITS, _SUMS_NBYTES = 4, 7 * 2**20
_NARROW_CHANNELS, _NARROW_SUMS_NBYTES = 32, 10 * 2**20
_SCRATCH_NBYTES = 147  # in addition to the copies
_TILE, _LOCK_NBYTES = 64, 16  # side and lock of the tiles in which attention accumulates a gradient
_WARP, _ROWS, _VECTOR = 32, 4, 4  # threads along the columns and the rows; columns per thread
# Rows per thread: ``min_values_per_thread`` and ``max_values_per_thread``.
_LEAST_ROWS, _MOST_ROWS = 16, 256
_PROCESSORS, _THREADS = 132, 2048  # processors of an H100, and threads that each runs at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Memory that an operation takes, and frees once it has made the first ``after`` of its results.

    An ``elastic`` workspace is optional: if there is no room for it, a slower kernel runs.
    """

    nbytes: int
    after: int
    elastic: bool = True


def cuda_workspaces(op: Any, args: Sequence[Any], result: Any) -> tuple[Workspace, ...]:
    """The workspaces of ``op`` on a CUDA device, in order, without those of 0 bytes.

    ``args`` and ``result`` are its arguments and what it returned; all tensors may be fake.

    >>> x, weight = torch.ones(1, 64, 8, 8, 8), torch.ones(32, 64, 3, 3, 3)
    >>> args = (x, weight, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    >>> result = aten.convolution.default(*args)
    >>> cuda_workspaces(aten.convolution.default, args, result)
    (Workspace(nbytes=417939, after=1, elastic=True),)
    """
    formula = _FORMULAS.get(op)
    found = () if formula is None else formula(result, *args)
    return tuple(workspace for workspace in found if workspace.nbytes)


def uses_blas(op: Any) -> bool:
    """Is ``op`` a matrix product, which cuBLAS computes?"""
    return op in _PRODUCTS


def _convolution(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[Workspace, ...]:
    if x.dtype == torch.float64 or _is_depthwise(x, weight, transposed):
        return ()
    nbytes = _copies(x, y, weight, padded=weight.element_size() < _PADDED_NBYTES)
    if not transposed and _is_plain(weight, dilation, groups):
        if _is_direct(weight, stride) or (x.size(1) == 1 and weight.dim() == _CONV3D_DIMS):
            nbytes = 0
        elif _writes_result(weight):
            nbytes = nbytes_of(x, weight)
    return (_workspace(nbytes, after=1),)


def _convolution_backward(
    result: Sequence[Tensor | None],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Workspace, ...]:
    if x.dtype == torch.float64 or _is_depthwise(x, weight, transposed):
        return ()
    found = []
    made = 0
    plain = _is_plain(weight, dilation, groups)
    if wanted[0]:
        made += 1
        nbytes = _copies(x, grad, weight, padded=weight.element_size() < _PADDED_NBYTES)
        if plain and transposed and weight.dtype == torch.float32 and _is_cube(weight, 2):
            nbytes = 0 if x.size(1) <= _DIRECT_CHANNELS else nbytes_of(grad, weight)
        elif plain and not transposed and (_is_direct(weight, stride) or _has_few_channels(x)):
            nbytes = 0
        found.append(_workspace(nbytes, after=made))
    if wanted[1]:
        made += 1
        nbytes = _copies(x, grad, weight, padded=True)
        if plain and _is_direct(weight, stride):
            if weight.dim() == _CONV2D_DIMS:
                nbytes = min(nbytes, _CONV2D_SPLITS * _FP32_NBYTES * weight.numel())
            elif weight.dtype != torch.float32:
                nbytes = 0
        elif not transposed:
            nbytes += _partial_sums(weight)
        found.append(_workspace(nbytes, after=made))
    return tuple(found)


def _attention_backward(
    result: Sequence[Tensor | None], grad: Tensor, query: Tensor, *others: Any
) -> tuple[Workspace, ...]:
    """Efficient attention in float32: row sums of ``grad * out``, then partial sums of a gradient.

    Source: ``_efficient_attention_backward`` in
    aten/src/ATen/native/transformers/cuda/attention_backward.cu, and ``workspace_elements_gq`` of
    kernel_backward.h there. The query's gradient is accumulated over splits of the keys, in tiles
    of 64 x 64 with a lock each. The formula gives the bytes measured for GPT-2 and a ViT on an H100. Half
    precision was not measured and counts as 0 bytes.
    """
    if query.dtype != torch.float32:
        return ()
    batch, heads, rows, width = query.shape
    tiles = -(-rows // _TILE) * -(-width // _TILE)
    sums = _FP32_NBYTES * batch * heads * rows
    partial = batch * heads * tiles * (_LOCK_NBYTES + _FP32_NBYTES * _TILE**2)
    made = sum(found is not None for found in result[:3])
    return (
        Workspace(nbytes=nbytes_of(grad) + 2 * sums, after=made, elastic=False),
        Workspace(nbytes=sums + partial, after=made, elastic=False),
    )


def _is_depthwise(x: Tensor, weight: Tensor, transposed: bool) -> bool:
    """Does every group have one input channel? Torch has its own kernels for such convolutions."""
    return not transposed and weight.size(1) == 1 and x.size(1) > 1


def _is_plain(weight: Tensor, dilation: Sequence[int], groups: int) -> bool:
    """Is it of the kind whose kernels were seen to use tensors as they are: no dilation, one group?"""
    return groups == 1 and (_is_pointwise(weight) or all(step == 1 for step in dilation))


def _is_cube(weight: Tensor, size: int) -> bool:
    """Is it a 3D kernel with this many points along each edge?"""
    return weight.dim() == _CONV3D_DIMS and all(points == size for points in weight.shape[2:])


def _has_few_channels(x: Tensor) -> bool:
    return x.size(1) < _FEW_CHANNELS and x.dtype == torch.float32


def _is_direct(weight: Tensor, stride: Sequence[int]) -> bool:
    """Are kernel size and stride 1? Such a convolution is a matrix product, which needs no copies."""
    return _is_pointwise(weight) and all(step == 1 for step in stride)


def _is_pointwise(weight: Tensor) -> bool:
    return all(size == 1 for size in weight.shape[2:])


def _writes_result(weight: Tensor) -> bool:
    """Does forward write its result directly, so that only input and weights are copied?"""
    if weight.dtype != torch.float32:
        return False
    many = weight.size(1) >= _NARROW_CHANNELS
    return _is_pointwise(weight) or (
        _is_cube(weight, 3) and weight.size(0) == _DIRECT_CHANNELS and many
    )


def _workspace(nbytes: int, *, after: int) -> Workspace:
    return Workspace(nbytes=nbytes + _SCRATCH_NBYTES if nbytes else 0, after=after)


def _partial_sums(weight: Tensor) -> int:
    """Bytes of fp32 partial sums for the weights' gradient: the most that was observed."""
    if weight.size(1) <= _NARROW_CHANNELS:
        return _NARROW_SUMS_NBYTES
    return min(_SPLITS * _FP32_NBYTES * weight.numel(), _SUMS_NBYTES)


def _copies(x: Tensor, y: Tensor, weight: Tensor, *, padded: bool) -> int:
    """Bytes of channels-last copies of all three tensors; ``padded``: channels are padded to 16 bytes."""
    if not padded:
        return nbytes_of(x, y, weight)
    return sum(t.numel() // t.size(1) * _padded(t) for t in (x, y)) + nbytes_of(weight)


def _padded(tensor: Tensor) -> int:
    """Bytes of the channels of one point, padded unless there is one channel."""
    channels: int = tensor.size(1)
    nbytes = channels * tensor.element_size()
    return nbytes if channels == 1 else -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _sum(
    result: Tensor, x: Tensor, dims: Sequence[int] | None = None, *others: Any
) -> tuple[Workspace, ...]:
    """Partial sums over rows, by ``setReduceConfig`` in ``ATen/native/cuda/Reduce.cuh``.

    A block has 32 x 4 threads (columns x rows), and each thread sums 4 columns. The rows are shared by
    as many blocks as keep the processors busy; each block writes one number per thread and column.
    """
    reduced = {d % x.dim() for d in dims or range(x.dim())}
    columns: int = result.numel()
    leading = reduced == set(range(len(reduced))) and len(reduced) < x.dim()
    if not leading or not x.is_contiguous() or columns % _VECTOR or columns < _VECTOR * _WARP:
        return ()
    rows_per_thread = -(-(x.numel() // columns) // _ROWS)
    if rows_per_thread < _LEAST_ROWS:
        return ()
    wide = -(-columns // (_VECTOR * _WARP))
    most = _PROCESSORS * _THREADS // (_WARP * _ROWS)
    if wide > most:
        return ()
    blocks = max(
        min(-(-most // wide), -(-rows_per_thread // _LEAST_ROWS)), -(-rows_per_thread // _MOST_ROWS)
    )
    if blocks == 1:
        return ()
    nbytes = _FP32_NBYTES * columns * blocks * _WARP * _VECTOR
    return (Workspace(nbytes=nbytes, after=1, elastic=False),)


_PRODUCTS = frozenset(
    getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot")
)
_FORMULAS: dict[Any, Callable[..., tuple[Workspace, ...]]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.sum.dim_IntList: _sum,
    aten._scaled_dot_product_efficient_attention_backward.default: _attention_backward,
}
