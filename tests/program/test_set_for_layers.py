"""What forward sets in a layer that is one node, and what such a layer changes besides forward.

A program stores what forward has set at its end. So code that sets something before such a layer runs
stays whole with it, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from other_inputs import assert_equal_calls
from torch import Tensor, nn

import placer
from placer.program import lower


class Whole(nn.Module):
    """Stays whole, reads its attributes, and adds to a list that it is given."""

    def __init__(self, terms: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.terms = nn.Linear(4, 4), terms
        self.scale, self.calls = 1.0, 0
        self.bias: Tensor | None = None
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = -x
        y: Tensor = self.layer(x) * self.scale * self.mean + self.calls
        self.terms.append(y.mean())
        self.calls += 1
        return y if self.bias is None else y + self.bias


class Net(nn.Module):
    def __init__(self, act: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.terms: list[Tensor] = []
        self.whole, self.drop, self.norm = Whole(self.terms), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.act, self.rate = act, 0.25

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def scale(net: Net, x: Tensor) -> Tensor:
    net.whole.scale = net.rate + 2
    net.rate += 1
    y: Tensor = net.whole(x)
    return y


def probability(net: Net, x: Tensor) -> Tensor:
    net.drop.p = net.rate
    net.rate = 1 - net.rate
    y: Tensor = net.drop(x)
    return y


def momentum(net: Net, x: Tensor) -> Tensor:
    net.norm.momentum = 1 / (net.rate + 2)
    net.rate += 1
    y: Tensor = net.norm(x)
    return y


def tensor(net: Net, x: Tensor) -> Tensor:
    net.whole.bias = x.mean(0)
    y: Tensor = net.whole(x)
    return y


def buffer(net: Net, x: Tensor) -> Tensor:
    net.whole.mean = net.whole.mean * 0.5
    y: Tensor = net.whole(x)
    return y


def cleared_before(net: Net, x: Tensor) -> Tensor:
    net.terms.clear()
    y: Tensor = net.whole(x)
    return y


def cleared_after(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.whole(x)
    net.terms.clear()
    return y


def added_to(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.whole(x)
    net.terms.append(x.mean())
    return y


def count(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.whole(x)
    net.whole.calls = 0
    return y


@pytest.mark.parametrize(
    "act",
    [scale, probability, momentum, tensor, buffer, cleared_before, cleared_after, added_to, count],
)
def test_it_is_refused(act: Callable[[Net, Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(placer.CaptureError, match=r"may read|stays whole changes too"):
        placer.compile(Net(act), {"devices": ["cpu:0"]}, x)


class Sets(nn.Module):
    """Sets a bias for a layer that stays whole, and takes it away."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.last = Whole([]), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x)
        self.whole.bias = x.mean(1, keepdim=True)
        y: Tensor = self.whole(x.repeat(1, 2))
        self.whole.bias = None
        return y


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Sets()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.first(x))
        return y


def test_the_code_that_sets_it_stays_whole_with_the_layer() -> None:
    calls = [lambda: (torch.randn(3, 4).double(),)] * 3
    assert_equal_calls(Around, calls, "one device")


class Settings:
    def __init__(self, table: dict[str, float]) -> None:
        self.table = dict(table)


class Registry:
    def __init__(self) -> None:
        self.settings = Settings({"scale": 2.0})

    def scale(self) -> float:
        self.settings = Settings(self.settings.table)  # as einx does
        return self.settings.table["scale"]


REGISTRY = Registry()


class LooksUp(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = -x
        return super().forward(x) * REGISTRY.scale()


def look_up(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.whole(x * REGISTRY.scale())
    return y * REGISTRY.scale()


def test_a_copy_of_what_the_layer_has_set_is_no_change() -> None:
    net, x = Net(look_up), torch.randn(3, 4)
    net.whole = LooksUp(4, 4)
    (whole,) = lower(net, (x,)).captured.whole_modules
    assert whole.layer == "whole"
    torch.testing.assert_close(placer.compile(net, {"devices": ["cpu:0"]}, x)(x), net(x))
