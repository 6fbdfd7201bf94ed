"""Which planes of its input a part of a convolution's output reads."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from placer.space.windows import Axis, window

D = torch.float64


@pytest.mark.matrix(1)
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
