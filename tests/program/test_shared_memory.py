"""Parameters, buffers and attributes of a model that have memory in common, or parts of one storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import placer

SPEC = {"devices": ["cpu:0", "cpu:1"]}


class Decays(nn.Module):
    """Reads two buffers, which are parts of one storage, and writes one of them."""

    def __init__(self, written: str, *, whole: bool) -> None:
        super().__init__()
        both = torch.rand(2, 4, dtype=torch.float64)
        self.register_buffer("first", both[0])
        self.register_buffer("second", both[1])
        self.register_buffer("both", both if written == "both" else None)
        self.view = both.T if written == "view" else None
        self.written, self.whole = written, whole

    def forward(self, x: Tensor) -> Tensor:
        if self.whole and x.sum() > 1e9:
            x = -x
        y = x * self.first.clone() + self.second.clone()
        getattr(self, self.written).mul_(0.9)
        return y + x * self.first.clone()


class Net(nn.Module):
    def __init__(self, written: str, *, whole: bool = False) -> None:
        super().__init__()
        self.layer, self.decays = nn.Linear(4, 4), Decays(written, whole=whole)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decays(self.layer(x))
        return y


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("written", ["first", "second"])
def test_parts_of_a_storage_are_written_each_by_itself(written: str, whole: bool) -> None:
    spec = {**SPEC, "checkpoint": ["decays"]}
    assert_same(Net(written, whole=whole).double(), spec, (torch.rand(3, 4).double(),))


def _transposed() -> nn.Module:
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pair[1].weight = nn.Parameter(pair[0].weight.t())
    return pair


@pytest.mark.parametrize("make", [lambda: Net("both"), lambda: Net("view"), _transposed])
def test_what_is_written_shares_no_memory(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(placer.PlacerError, match="shares memory with"):
        placer.compile(make(), SPEC, torch.rand(3, 4))


def test_of_flat_parameters_some_may_be_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
    model[0].weight.requires_grad_(False)
    assert_same(model, SPEC, (torch.rand(3, 4).double(),))
