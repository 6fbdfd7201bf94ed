"""A convolution in chunks equals the module on the concatenation, with all gradients."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer.space.chunked import ChunkedConvolution, is_chunkable
from placer.space.windows import Axis, window

D = torch.float64


def _random_case(seed: int) -> tuple[nn.Module, list[Tensor], int]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dims = draw.choice((1, 2, 3))
    groups = draw.choice((1, 1, 2))
    channels = [groups * draw.randint(1, 2) for _ in range(draw.randint(1, 3))]
    kernel = [draw.randint(1, 5 if dims == 1 else 3) for _ in range(dims)]
    dilation = [draw.randint(1, 3) for _ in range(dims)]
    stride = [draw.randint(1, 4) for _ in range(dims)]
    options: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
        "bias": draw.random() < 0.7,
    }
    if draw.random() < 0.5:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        options["padding"] = [draw.randint(0, min(2, r)) for r in reach]
        limits = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        options["output_padding"] = [draw.randint(0, limit) for limit in limits]
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        options["padding"] = [draw.randint(0, 3) for _ in range(dims)]
        if options["stride"] == [1] * dims and draw.random() < 0.5:
            options["padding"] = draw.choice(("same", "valid"))
    module = kind(sum(channels), 2 * groups, **options).to(D)
    shape = [draw.randint(9, 16), *(draw.randint(7, 9) for _ in range(dims - 1))]
    rows = draw.randint(1, 2)
    parts = [torch.randn(rows, each, *shape, dtype=D, requires_grad=True) for each in channels]
    return module, parts, draw.choice((1, 2, 3, 5, 40))


@pytest.mark.matrix(10)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("seed", range(400))
def test_random_convolutions(seed: int) -> None:
    module, parts, count = _random_case(seed)
    try:
        expected = module(torch.cat(parts, 1))
    except RuntimeError:  # torch refuses it: the kernel is larger than the input
        return
    if not is_chunkable(module):
        assert module.padding == "same"
        return
    other, given = copy.deepcopy(module), [x.detach().clone().requires_grad_() for x in parts]
    found = ChunkedConvolution(count)(other, *given)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    pairs = [
        *zip(given, parts, strict=True),
        *zip(other.parameters(), module.parameters(), strict=True),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transposed", [False, True])
def test_windows_have_all_that_an_output_plane_reads_and_no_more(transposed: bool) -> None:
    """The planes that a plane of the output depends on, found by gradients, against the arithmetic."""
    for seed in range(60):
        draw = random.Random(seed)
        kernel, stride, dilation = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2)
        reach = dilation * (kernel - 1)
        padding, length = draw.randint(0, min(2, reach)), draw.randint(8, 12)
        kind = nn.ConvTranspose1d if transposed else nn.Conv1d
        module = kind(1, 1, kernel, stride, padding, dilation=dilation).to(D)
        nn.init.ones_(module.weight)
        axis = Axis(
            length=length,
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            transposed=transposed,
        )
        x = torch.randn(1, 1, length, dtype=D, requires_grad=True)
        y = module(x)
        for first in range(y.size(2)):
            end = draw.randint(first + 1, y.size(2))
            (gradient,) = torch.autograd.grad(y[..., first:end].sum(), x, retain_graph=True)
            read = gradient.flatten().nonzero().flatten().tolist()
            found = window(axis, first, end)
            if read:
                assert found.first <= read[0]
                assert read[-1] < found.end
                assert max(found.first, 0) >= read[0] - (stride if transposed else dilation)


def test_it_keeps_the_parts_and_no_concatenation() -> None:
    parts = [torch.randn(1, 4, 32, 8, 8, requires_grad=True) for _ in range(2)]
    saved: list[Tensor] = []
    module = nn.Conv3d(8, 4, 3, padding=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ChunkedConvolution(8)(module, *parts)
    assert sorted(x.numel() for x in saved) == sorted(x.numel() for x in (module.weight, *parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_computes_what_the_module_does(dtype: torch.dtype) -> None:
    parts = [torch.randn(2, 3, 8, 5, 5) for _ in range(2)]
    module = nn.Conv3d(6, 4, 3, padding=1)
    with torch.autocast("cpu", dtype=dtype):
        found, expected = ChunkedConvolution(3)(module, *parts), module(torch.cat(parts, 1))
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_without_a_batch_the_parts_are_side_by_side_in_space() -> None:
    parts = [torch.randn(3, 8) for _ in range(2)]
    module = nn.Conv1d(3, 4, 3)
    torch.testing.assert_close(ChunkedConvolution(3)(module, *parts), module(torch.cat(parts, 1)))


def test_a_module_with_hooks_is_called() -> None:
    parts = [torch.randn(2, 3, 8) for _ in range(2)]
    module = nn.Conv1d(6, 4, 3)
    module.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(ChunkedConvolution(3)(module, *parts), module(torch.cat(parts, 1)))
