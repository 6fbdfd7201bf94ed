"""Variables that hold a part of the model: in a call of the placed model, its own part is meant."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_inputs import CUT, WAYS, assert_equal_state, compile_way
from torch import Tensor, nn
from torch.nn import functional as F

import placer

D = torch.float64
PART: Any = None
HELD: dict[str, Any] = {}


class Net(nn.Module):
    shared: Any = None

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.b.register_buffer("count", torch.zeros(()))
        self.b[1].eval()
        self.calls, self.use = 0, use

    def forward(self, x: Tensor, *, double: bool = False) -> Tensor:
        y = self.use(self, self.a(x))
        return y * 2 if double else y

    def train(self, mode: bool = True) -> Net:
        """Keep the norm in eval mode."""
        super().train(mode)
        self.b[1].eval()
        return self


def hold(net: nn.Module) -> None:
    global PART
    part = net.get_submodule("b")
    PART, Net.shared = part, part
    HELD.update(list=[part], tuple=(part,), object=types.SimpleNamespace(part=part))
    HELD.update(weight=part[0].weight, method=part.forward)


def counting(self: Any, x: Tensor) -> Tensor:
    PART.count = PART.count + 1
    return self.b(x) * PART.count


def noting(self: Any, x: Tensor) -> Tensor:
    PART.last = self.b(x)
    return self.b(x) if PART.training else self.b(x).tanh()


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a global variable": lambda self, x: PART(x),
    "an attribute of the class": lambda self, x: type(self).shared(x),
    "a list": lambda self, x: HELD["list"][0](x),
    "a tuple": lambda self, x: HELD["tuple"][0](x),
    "an object": lambda self, x: HELD["object"].part(x),
    "a method": lambda self, x: HELD["method"](x),
    "its layers": lambda self, x: PART[1](PART[0](x)),
    "a weight": lambda self, x: F.linear(x, HELD["weight"]),
    "a weight of it": lambda self, x: F.linear(self.b(x), PART[0].weight),
    "its mode": noting,
    "its buffer": counting,
}


@pytest.mark.matrix(11)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("use", USES)
def test_in_every_form_of_call(use: str, way: str) -> None:
    models = []
    for _ in "ab":
        torch.manual_seed(0)
        models.append(Net(USES[use]).double())
    plain, model = models
    hold(model)
    x = torch.randn(4, 4, dtype=D)
    try:
        placed = compile_way(model, (x,), way)
    except placer.PlacerError as error:
        assert use == "its buffer", error
        assert way in CUT, error
        assert "it sets the buffer b.count" in str(error)
        return
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for number, call in enumerate(({}, {"double": True}, {}, {"double": True})):
        results = []
        for net in (plain, placed):
            net.train(number < 2)
            hold(plain if net is plain else model)
            net.zero_grad()
            results.append(net(x, **call))
            results[-1].square().mean().backward()
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
        assert_equal_state(placed, plain, f"call {number}")
        with torch.no_grad():
            for net in (plain, placed):
                for weight in net.parameters():
                    weight.mul_(1.1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert "last" not in vars(model.b)
    assert hasattr(placed.b, "last") == hasattr(plain.b, "last")


def test_a_deep_copy_means_its_own_part() -> None:
    torch.manual_seed(0)
    model, x = Net(USES["a global variable"]).double(), torch.randn(4, 4, dtype=D)
    hold(model)
    placed = copy.deepcopy(compile_way(model, (x,), "stages"))
    with torch.no_grad():
        placed.b[0].weight.zero_()
    found = placed(x, double=True)
    with torch.no_grad():
        model.b[0].weight.zero_()
    torch.testing.assert_close(found, model(x, double=True))


class Decides(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x if x.sum() > 0 else -x)


@pytest.mark.parametrize("use", ["a global variable", "a weight", "a method"])
@pytest.mark.parametrize("whole", ["a module", "the model"])
def test_code_that_stays_whole_is_refused(use: str, whole: str) -> None:
    inner = Decides(USES[use])
    net = Net(lambda self, x: self.inner(x) if whole == "a module" else inner.use(self, x))
    if whole == "a module":
        net.inner = inner
    else:
        net.use = lambda self, x: USES[use](self, x if x.sum() > 0 else -x)
    hold(net)
    with pytest.raises(placer.CaptureError, match=r"through a variable .*test_parts_in_variables"):
        compile_way(net.float(), (torch.randn(4, 4),), "stages")


class Scales(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Tables:
    def __init__(self) -> None:
        self.table = {"scale": torch.randn(4, dtype=D)}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["part", "torch's", "own", "object"])
def test_another_one_in_the_variable(kind: str) -> None:
    uses: dict[str, Any] = {"object": lambda self, x: x * HELD["list"][0].table["scale"]}
    net = Net(uses.get(kind, USES["a list"])).double()
    makes: dict[str, Callable[[], Any]] = {
        "torch's": lambda: nn.Linear(4, 4).double(),
        "own": lambda: Scales(4, 4).double(),
        "object": Tables,
    }
    parts = [net.a, net.b] if kind == "part" else [makes[kind]() for _ in "ab"]
    HELD["list"] = [parts[0]]
    x = torch.randn(4, 4, dtype=D)
    placed = compile_way(net, (x,), "stages")
    for part in (*parts, *parts):
        HELD["list"] = [part]
        torch.testing.assert_close(placed(x), net(x))
