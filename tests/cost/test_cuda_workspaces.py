"""Workspaces of CUDA kernels: the rules give the bytes measured on an H100 (torch 2.11, cuDNN 9.19)."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from placer.cost import cuda_workspaces

aten = torch.ops.aten
MIB = 2**20
F32, BF16 = torch.float32, torch.bfloat16

# input, weight, stride, padding, transposed, dtype; MiB forward, gradient of the input, of the weights
MEASURED = [
    ((1, 64, 160, 160, 160), (32, 64, 3, 3, 3), 1, 1, False, F32, (1500.2, 1500.2, 1502.0)),
    ((1, 64, 112, 112, 112), (64, 64, 3, 3, 3), 1, 1, False, F32, (344.0, 686.4, 688.1)),
    ((1, 1, 224, 224, 224), (32, 1, 3, 3, 3), 1, 1, False, F32, (0.0, 0.0, 1416.0)),
    ((1, 32, 160, 160, 160), (3, 32, 1, 1, 1), 1, 0, False, F32, (0.0, 0.0, 564.0)),
    ((1, 128, 160, 80, 80), (256, 128, 1, 1, 1), 2, 0, False, F32, (500.1, 626.0, 630.0)),
    ((1, 128, 64, 64, 64), (128, 64, 2, 2, 2), 2, 0, True, F32, (640.3, 512.3, 644.3)),
    ((1, 64, 128, 128, 128), (64, 32, 2, 2, 2), 2, 0, True, F32, (2560.1, 0.0, 2562.1)),
    ((64, 256, 56, 56), (128, 256, 1, 1), 1, 0, False, F32, (0.0, 0.0, 8.0)),
    ((64, 128, 56, 56), (128, 128, 3, 3), 2, 1, False, F32, (124.0, 124.0, 130.9)),
    ((1, 64, 128, 128, 128), (32, 64, 3, 3, 3), 1, 1, False, BF16, (384.1, 384.1, 386.0)),
    ((64, 3, 224, 224), (64, 3, 7, 7), 2, 3, False, BF16, (148.0, None, 152.9)),
]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_workspaces_of_convolutions(row: tuple) -> None:
    shape, kernel, stride, padding, transposed, dtype, measured = row
    dims = len(shape) - 2
    with FakeTensorMode():
        x, weight = torch.empty(shape, dtype=dtype), torch.empty(kernel, dtype=dtype)
        how = [[stride] * dims, [padding] * dims, [1] * dims, transposed, [0] * dims, 1]
        y = aten.convolution.default(x, weight, None, *how)
        found = [cuda_workspaces(aten.convolution.default, (x, weight, None, *how), y)]
        for wanted in ([True, False, False], [False, True, False]):
            args = (y, x, weight, None, *how, wanted)
            found.append(cuda_workspaces(aten.convolution_backward.default, args, ()))
    for workspaces, expected in zip(found, measured, strict=True):
        if expected is None:
            continue  # of the few-channel kernels, cuDNN took this one for fp32 only
        nbytes = sum(w.nbytes for w in workspaces)
        assert nbytes == pytest.approx(expected * MIB, rel=0.04, abs=6 * MIB)
        assert all(w.elastic and w.after == 1 for w in workspaces)


def _convolution(shape: tuple, kernel: tuple, dilation: int, groups: int) -> list[int]:
    """Bytes of workspaces: forward, gradient of the input, of the weights."""
    dims = len(shape) - 2
    x, weight = torch.empty(shape, device="meta"), torch.empty(kernel, device="meta")
    padding = [dilation * (size // 2) for size in kernel[2:]]
    how = [[1] * dims, padding, [dilation] * dims, False, [0] * dims, groups]
    y = aten.convolution.default(x, weight, None, *how)
    found = cuda_workspaces(aten.convolution.default, (x, weight, None, *how), y)
    args = (y, x, weight, None, *how, [True, True, False])
    return [
        w.nbytes for w in (*found, *cuda_workspaces(aten.convolution_backward.default, args, ()))
    ]


@pytest.mark.parametrize(
    ("shape", "kernel", "dilation", "groups"),
    [
        ((1, 64, 96, 96, 96), (64, 64, 3, 3, 3), 4, 1),  # seen to write its result if not dilated
        ((1, 64, 96, 96, 96), (64, 64, 5, 5, 5), 1, 1),
        ((1, 1, 96, 96, 96), (32, 1, 3, 3, 3), 2, 1),
        ((1, 64, 96, 96, 96), (64, 16, 1, 1, 1), 1, 4),
        ((8, 1, 64, 64), (32, 1, 3, 3), 1, 1),
    ],
)
def test_what_was_not_measured_takes_all_copies(
    shape: tuple, kernel: tuple, dilation: int, groups: int
) -> None:
    result = (shape[0], kernel[0], *shape[2:])
    copies = 4 * (math.prod(shape) + math.prod(result) + math.prod(kernel))
    forward, *gradients = _convolution(shape, kernel, dilation, groups)
    assert copies <= forward < copies + 200
    assert gradients[-1] >= copies
    if dilation > 1 or groups > 1:
        assert len(gradients) == 2 and gradients[0] >= copies


def test_both_gradients_take_one_after_the_other() -> None:
    x, weight = torch.empty(1, 64, 8, 8, 8), torch.empty(64, 64, 3, 3, 3)
    how = [[1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1]
    args = (x, x, weight, [64], *how, [True, True, True])
    found = cuda_workspaces(aten.convolution_backward.default, args, ())
    assert [w.after for w in found] == [1, 2]


def test_double_precision_and_depthwise_convolutions_take_none() -> None:
    how = [[1] * 2, [1] * 2, [1] * 2, False, [0] * 2]
    x, weight = torch.empty(1, 8, 4, 4), torch.empty(8, 1, 3, 3)
    y = aten.convolution.default(x, weight, None, *how, 8)
    assert cuda_workspaces(aten.convolution.default, (x, weight, None, *how, 8), y) == ()
    x, weight = x.double(), torch.empty(8, 8, 3, 3).double()
    y = aten.convolution.default(x, weight, None, *how, 1)
    assert cuda_workspaces(aten.convolution.default, (x, weight, None, *how, 1), y) == ()


@pytest.mark.parametrize(
    ("rows", "columns", "nbytes"),
    [
        (32 * 197, 3072, 138412032),
        (32 * 197, 2304, 116785152),
        (32 * 197, 768, 38928384),
        (8 * 512, 3072, 100663296),
        (8 * 512, 768, 25165824),
    ],
)
def test_partial_sums_of_a_bias_gradient(rows: int, columns: int, nbytes: int) -> None:
    with FakeTensorMode():
        grad = torch.empty(rows, columns)
        (found,) = cuda_workspaces(aten.sum.dim_IntList, (grad, [0], True), grad.sum(0))
    assert found.nbytes == nbytes
    assert not found.elastic


def test_sums_along_rows_take_none() -> None:
    x = torch.empty(64, 4096)
    assert cuda_workspaces(aten.sum.dim_IntList, (x, [1]), x.sum(1)) == ()
    assert cuda_workspaces(aten.sum.dim_IntList, (x, None), x.sum()) == ()


@pytest.mark.parametrize(
    ("shape", "measured"),
    [((8, 12, 512, 64), 12_595_200), ((32, 12, 197, 64), 25_190_400)],  # GPT-2, ViT-B/16
)
def test_the_backward_of_efficient_attention_takes_what_an_h100_was_seen_to_give_it(
    shape: tuple[int, ...], measured: int
) -> None:
    """The sums over rows took 196,608 and 302,592 bytes, twice, beside a product; then with the tiles."""
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    query = torch.empty(shape, device="meta")
    rows = 4 * shape[0] * shape[1] * shape[2]
    assert rows in (196_608, 302_592)
    product, tiles = cuda_workspaces(backward, (query, query), (query, query, query, None))
    assert (product.nbytes, tiles.nbytes) == (query.nbytes + 2 * rows, rows + measured)
    assert (product.after, product.elastic, tiles.after, tiles.elastic) == (3, False, 3, False)
    half = query.bfloat16()  # not measured
    assert cuda_workspaces(backward, (half, half), (half, half, half, None)) == ()
