"""Variables that forward sets and its code does not name, or that do not exist before; context variables."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn

import placer

TWO: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"]}
X = torch.randn(6, 4, dtype=torch.float64)
SEEN: ContextVar[Any] = ContextVar("SEEN", default=None)
SCALE: ContextVar[float] = ContextVar("SCALE", default=2.0)


class Net(nn.Module):
    def __init__(self, act: Callable[[Net, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        scaled = self.act(self, y)
        result: Tensor = self.b(y if scaled is None else scaled)
        return result


def _counts(net: Net, y: Tensor) -> None:
    kind: Any = type(net)
    kind.count = getattr(kind, "count", 0) + 1


WAYS: dict[str, Callable[[Net, Tensor], Any]] = {
    "Net.latest": lambda net, y: setattr(Net, "latest", y),
    "Net.count": _counts,
    "LATEST": lambda net, y: globals().update(LATEST=y),
    "EARLIER": lambda net, y: globals().update(EARLIER=y),
}
globals()["EARLIER"] = None


@pytest.mark.parametrize("name", WAYS)
def test_one_that_is_not_followed_is_refused(name: str) -> None:
    with pytest.raises(placer.CaptureError, match=rf"{name}: is set by forward"):
        placer.compile(Net(WAYS[name]), TWO, X)
    assert not hasattr(Net, "latest") and not hasattr(Net, "count")
    assert "LATEST" not in globals() and globals()["EARLIER"] is None


def test_a_warning_is_no_new_name() -> None:
    globals().pop("__warningregistry__", None)
    with pytest.warns(UserWarning, match="careful"):
        warnings.simplefilter("default")
        placer.compile(Net(lambda net, y: warnings.warn("careful", stacklevel=1)), TWO, X)


def test_a_context_variable_is_set() -> None:
    model = Net(lambda net, y: SEEN.set(y * 2) and None)
    placed = placer.compile(model, TWO, X)
    assert SEEN.get() is None
    placed(X)
    found = SEEN.get()
    model(X)
    assert_close(found, SEEN.get(), "SEEN")
    SEEN.set(None)


def test_a_context_variable_is_read_in_every_call() -> None:
    model = Net(lambda net, y: y * SCALE.get())
    placed = placer.compile(model, TWO, X)
    for scale in (2.0, 3.0, 4.0):
        SCALE.set(scale)
        assert_close(placed(X), model(X), "output")
