"""Functions and objects among the arguments: what the same one changes, or is changed in, is seen."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
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
    shift: Tensor


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


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize("make", [Net, Writes])
def test_an_object_that_changes_between_calls(make: Any, way: str) -> None:
    torch.manual_seed(0)
    model, ours = make().double(), Plain()
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


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", WAYS)
def test_another_object_is_refused(way: str) -> None:
    with pytest.raises(CaptureError, match=r"of type \w+, but not the captured|micro-batch of 2x8"):
        compile_way(Net().double(), (rows(), Plain()), way)(rows(), Plain())


@pytest.mark.parametrize(
    ("given", "problem"), [(Fields(rows()), "dataclass with tensors"), (iter([1]), "an iterator")]
)
def test_what_every_call_would_have_to_give_again_is_refused_at_compile(
    given: Any, problem: str
) -> None:
    with pytest.raises(CaptureError, match=problem):
        compile_way(Net().double(), (rows(), given), "one device")


class Tracker:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.calls, self.gain = 0, 2.0

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(x * 2)
        self.calls += 1
        return x * self.gain


class Metric(nn.Module, Tracker):  # type: ignore[misc]  # a module outside of the model
    def __init__(self) -> None:
        nn.Module.__init__(self)
        Tracker.__init__(self)
        self.register_buffer("sum", torch.zeros(8, dtype=D))
        self.sum: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        self.sum += x.detach().mean(0)
        return Tracker.__call__(self, x)


class CallsBack(nn.Module):
    """Calls a function that it gets, or holds, or names."""

    def __init__(self, held: Any, named: Any) -> None:
        super().__init__()
        self.first, self.last, self.held = nn.Linear(8, 8), nn.Linear(8, 8), held
        self.call = lambda x: named(x)

    def forward(self, x: Tensor, function: Any = None) -> Tensor:
        for each in (function, self.held, self.call):
            result = each(x := self.first(x)) if each is not None else None
            x = x if result is None else result
        return self.last(x)


FUNCTIONS: dict[str, Any] = {
    "closure": lambda t: lambda x: t(x),
    "bound method": lambda t: t.__call__,
    "object": lambda t: t,
    "method of a list": lambda t: t.seen.append,
    "in a container": lambda t: [t.__call__, t][-1],
    "default": lambda t: lambda x, f=t: f(x),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", UNCUT)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((Tracker, place) for place in ("argument", "attribute", "variable")),
        *((Metric, place) for place in ("argument", "variable")),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_function_keeps(function: str, kind: Any, place: str, way: str) -> None:
    found = []
    for placed in (True, False):
        torch.manual_seed(0)
        tracker = kind()
        given = FUNCTIONS[function](tracker)
        nothing = torch.nn.functional.relu
        model: Any = CallsBack(
            given if place == "attribute" else None, given if place == "variable" else nothing
        ).double()
        others = (given,) if place == "argument" else ()
        if placed:
            model = compile_way(model, (rows(), *others), way)
            assert not tracker.seen and not tracker.calls
        for step, gain in enumerate((2.0, 3.0, 0.5)):
            torch.manual_seed(step)
            tracker.gain = gain
            found += [model(rows(), *others), *tracker.seen, torch.tensor(tracker.calls)]
            found += [tracker.sum.clone()] if kind is Metric else []
    half = len(found) // 2
    for ours, theirs in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_a_named_tuple_is_seen_into(way: str) -> None:
    assert_equal_calls(Net, [lambda: (rows(), Named(rows(), 2.0))] * 3, way)
