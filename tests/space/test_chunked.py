"""A convolution in chunks equals the module on the concatenation, with all gradients."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from placer.program import Program, lower
from placer.space import count_chunked
from placer.spec.rewrite import Rewrite

D = torch.float64


def _random_case(seed: int) -> tuple[nn.Module, list[Tensor], int]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dims = draw.choice((1, 2, 3))
    groups = draw.choice((1, 1, 2))
    channels = [groups * draw.randint(1, 2) for _ in range(draw.randint(2, 3))]
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
    return module, parts, draw.choice((2, 3, 5, 40))


class _Joined(nn.Module):
    """A convolution of a concatenation of channels."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, parts: list[Tensor]) -> Tensor:
        found: Tensor = self.module(torch.cat(parts, 1))
        return found


def _lower(module: nn.Module, parts: list[Tensor], count: int) -> Program:
    chunks = Rewrite(name="chunks", settings={"count": count})
    return lower(_Joined(module), (parts,), None, (chunks,))


def _run(program: Program, parts: list[Tensor]) -> Tensor:
    (found,) = fx.Interpreter(program.model, graph=program.graph).run(*parts)
    assert isinstance(found, Tensor)
    return found


def _chunked(module: nn.Module, parts: list[Tensor], count: int) -> Tensor:
    program = _lower(module, parts, count)
    assert count_chunked(program) == 1
    return _run(program, parts)


@pytest.mark.matrix(1)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("seed", range(400))
def test_random_convolutions(seed: int) -> None:
    module, parts, count = _random_case(seed)
    try:
        expected = module(torch.cat(parts, 1))
    except RuntimeError:  # torch refuses it: the kernel is larger than the input
        return
    other, given = copy.deepcopy(module), [x.detach().clone().requires_grad_() for x in parts]
    program = _lower(other, given, count)
    assert count_chunked(program) or module.padding == "same"
    found = _run(program, given)
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


def test_it_keeps_the_parts_and_no_concatenation() -> None:
    parts = [torch.randn(1, 4, 32, 8, 8, requires_grad=True) for _ in range(2)]
    saved: list[Tensor] = []
    module = nn.Conv3d(8, 4, 3, padding=1)
    program = _lower(module, parts, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        _run(program, parts)
    expected = (*module.parameters(), *parts)
    assert sorted(x.numel() for x in saved) == sorted(x.numel() for x in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_computes_what_the_module_does(dtype: torch.dtype) -> None:
    parts = [torch.randn(2, 3, 8, 5, 5) for _ in range(2)]
    module = nn.Conv3d(6, 4, 3, padding=1)
    with torch.autocast("cpu", dtype=dtype):
        found, expected = _chunked(module, parts, 3), module(torch.cat(parts, 1))
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_without_a_batch_the_concatenation_is_made() -> None:
    parts = [torch.randn(3, 8) for _ in range(2)]
    program = _lower(nn.Conv1d(3, 4, 3), parts, 3)
    assert not count_chunked(program)


def test_a_module_that_gets_hooks_later_is_called() -> None:
    parts = [torch.randn(2, 3, 8) for _ in range(2)]
    module = nn.Conv1d(6, 4, 3)
    program = _lower(module, parts, 3)
    module.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(_run(program, parts), module(torch.cat(parts, 1)))
