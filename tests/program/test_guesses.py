"""Code that needs True of one value and False of another keeps its module whole, and is no error."""

from __future__ import annotations

import pytest
import torch
from other_inputs import UNCUT, WAYS, Arguments, assert_equal_calls
from torch import Tensor, nn

import placer
from placer.program import lower


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Asserts(Inner):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        assert not torch.isnan(x).any()
        return self.linear(x)


class AssertsOnOneLine(Inner):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all() and not torch.isnan(x).any()
        return self.linear(x)


class Raises(Inner):
    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        if not (x.abs() < 1e9).all():
            raise ValueError("too large")
        return self.linear(x)


class Numbers(Inner):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() < 0.5 or x.abs().mean().item() > 0.9:
            raise ValueError("not of a unit normal distribution")
        return self.linear(x)


class OnlyTrue(Inner):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        return self.linear(x)


class OnlyFalse(Inner):
    def forward(self, x: Tensor) -> Tensor:
        assert not torch.isnan(x).any()
        return self.linear(x)


class Net(nn.Module):
    def __init__(self, *inner: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Sequential(*(cls() for cls in inner))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


KINDS = {
    "asserts": (Asserts,),
    "asserts on one line": (AssertsOnOneLine,),
    "raises": (Raises,),
    "numbers": (Numbers,),
    "one True, one False": (OnlyTrue, OnlyFalse),
    "several": (OnlyFalse, Raises, OnlyTrue, Asserts),
}


def batch() -> Arguments:
    return (torch.randn(16, 8, dtype=torch.float64),)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_the_module_stays_whole(name: str, way: str) -> None:
    inner = KINDS[name]
    placed = assert_equal_calls(lambda: _like_units(Net(*inner)), [batch] * 3, way)
    assert (len(placed.plan.stages) > 1) == (way != "one device")
    program = lower(Net(*inner).double(), batch())
    assert [w.layer for w in program.captured.whole_modules] == [
        f"inner.{i}" for i in range(len(inner))
    ]


def _like_units(model: Net) -> Net:
    """Let its first layer change nothing."""
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(8))
        model.first.bias.zero_()
    return model


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        assert not torch.isnan(x).any()
        return self.last(self.first(x))


@pytest.mark.parametrize("way", [way for way in UNCUT if way != "recomputed"])
def test_a_model_that_asserts_by_itself(way: str) -> None:
    assert_equal_calls(Root, [batch] * 3, way)


class Impossible(Inner):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() != 3:
            raise ValueError("always")
        return self.linear(x)


def test_what_fails_with_every_guess_is_an_error_that_names_the_line() -> None:
    with pytest.raises(placer.CaptureError, match=r"ValueError: always \(.*test_guesses.py:"):
        lower(Net(Impossible), batch())


class Picks(Inner):
    """Picks one of its settings, and takes no more than sixteen rows."""

    def forward(self, x: Tensor) -> Tensor:
        scale = (2.0,)[int(torch.isnan(x).any())]
        if len(x) > 16:
            raise ValueError("too many rows")
        return self.linear(x) * scale


def test_a_batch_that_no_guess_lets_pass_changes_no_guess() -> None:
    model, (x,) = Net(Picks).double(), batch()
    placed = placer.compile(model, {"devices": ["cuda:0", "cuda:1"]}, x, run_on="cpu")
    torch.testing.assert_close(placed(x), model(x))
