"""Arguments that pytree does not flatten: changes of the same object are seen, another one is refused."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from other_inputs import UNCUT, WAYS, assert_equal_calls, compile_way
from torch import Tensor, nn

from placer import CaptureError

D = torch.float64


def rows() -> Tensor:
    return torch.randn(4, 8, dtype=D)


class Plain:
    def __init__(self) -> None:
        self.shift, self.scale, self.log = rows(), 2.0, []


@dataclass
class Fields:
    shift: Tensor = field(default_factory=rows)
    scale: float = 2.0
    log: list[Any] = field(default_factory=list)


Named = namedtuple("Named", ("shift", "scale"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return self.last(self.first(x) + given.shift) * given.scale


class Writes(Net):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        x = super().forward(x, given)
        given.shift = x.detach()
        given.log.append(x.detach().mean())
        return x


@pytest.mark.matrix(3)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize("kind", [Plain, Fields])
@pytest.mark.parametrize("make", [Net, Writes])
def test_an_object_that_changes_between_calls(make: Any, kind: Any, way: str) -> None:
    torch.manual_seed(0)
    model, ours = make().double(), kind()
    placed = compile_way(model, (rows(), ours), way)
    theirs = copy.deepcopy(ours)
    assert not ours.log
    for step in range(4):
        x, shift = rows(), rows()
        for given in (ours, theirs):
            if step == 1:
                given.scale = 3.0
            elif step == 2:
                given.shift = shift.clone()
            elif step == 3:
                given.shift.mul_(2)
        found, expected = placed(x, ours), model(x, theirs)
        assert torch.allclose(found, expected, rtol=1e-10)
        assert torch.allclose(ours.shift, theirs.shift, rtol=1e-10)
        assert torch.allclose(torch.tensor(ours.log), torch.tensor(theirs.log), rtol=1e-10)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Plain, Fields])
def test_another_object_is_refused(kind: Any, way: str) -> None:
    with pytest.raises(CaptureError, match=r"of type \w+, but not the captured|micro-batch of 2x8"):
        compile_way(Net().double(), (rows(), kind()), way)(rows(), kind())


@pytest.mark.parametrize("way", WAYS)
def test_a_named_tuple_is_seen_into(way: str) -> None:
    assert_equal_calls(Net, [lambda: (rows(), Named(rows(), 2.0))] * 3, way)
