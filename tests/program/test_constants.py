"""Tensors and numbers that forward makes of numpy's arrays and of plain numbers are constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program import lower
from tests.oracle import assert_same

SPEC = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}
F64 = torch.float64


def array(x: Tensor) -> Tensor:
    scale = torch.tensor(np.arange(4.0)) + torch.as_tensor(np.ones(4)) + x.new_tensor(np.ones(4))
    return x * scale


def old_constructor(x: Tensor) -> Tensor:
    return x + torch.DoubleTensor([1, 2, 3, 4])


def listed(x: Tensor) -> Tensor:
    first, second = torch.tensor([1.0, 2.0]).tolist()
    return x * first + second


def item(x: Tensor) -> Tensor:
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
    return x * rates[1] * torch.tensor([1.0, 2.0]).sum().item()


def condition(x: Tensor) -> Tensor:
    return x * 2 if torch.tensor([1, 0, 1]).any() else x


def indices(x: Tensor) -> Tensor:
    return x[:, [int(i) for i in torch.arange(x.shape[1]).flip(0)]]


def array_indices(x: Tensor) -> Tensor:
    chosen = x[:, np.array([3, 0, 0, 1])] + x[..., np.array([True, False, True, False])].sum()
    chosen = chosen + x.unflatten(1, (2, 2))[:, np.eye(2, dtype=bool)].sum(1, keepdim=True)
    chosen[:, np.array([1, 2])] = 0.5
    return chosen


def written(x: Tensor) -> Tensor:
    mask = torch.from_numpy(np.zeros(4))
    mask[0] = 1.0  # of this run alone
    mask += x.sum()
    return x + mask


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "function", [array, old_constructor, listed, item, condition, indices, array_indices, written]
)
def test_they_keep_no_module_whole(function: Callable[[Tensor], Tensor]) -> None:
    model, x = Nested(function).double(), torch.randn(4, 4, dtype=F64)
    program = lower(model, (x,))
    assert not program.captured.whole_modules
    assert not program.captured.fixed_batch_reason
    again = lower(model, (x,))
    assert again.fingerprint == program.fingerprint
    assert_same(
        model, {**SPEC, "microbatches": 1 if function in (array_indices, written) else 2}, (x,)
    )


def of_the_batch(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.full((x.shape[0], 4), 0.5))


def number_of_rows(x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.array(float(x.shape[0])))


def listed_rows(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0]).tolist()[-1]


def written_before(x: Tensor) -> Tensor:
    mask = torch.zeros(4)
    mask[0] = 1
    return x * (mask.tolist()[0] + 1)


@pytest.mark.parametrize("function", [of_the_batch, number_of_rows, listed_rows, written_before])
def test_what_the_batch_or_a_write_decides_is_no_constant(function: Any) -> None:
    model, x = Nested(function).double(), torch.randn(4, 4, dtype=F64)
    assert [whole.layer for whole in lower(model, (x,)).captured.whole_modules] == ["inner"]
    if function in (of_the_batch, written_before):
        assert_same(model, SPEC, (x,))
    else:
        with pytest.raises(placer.CaptureError, match="inner: it computes"):
            placer.compile(model, SPEC, (x,), run_on="cpu")


class Nested(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Inner(function)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Inner(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))
