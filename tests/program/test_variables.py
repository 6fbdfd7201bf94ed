"""Variables of the model's code: a call uses what is in them then, and leaves in them what forward does."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from other_inputs import WAYS, Arguments, assert_equal_calls, compile_way
from torch import Tensor, nn
from torch.nn import functional as F

import placer
from placer.executor.calls.numbers import RecaptureWarning
from placer.program.objects.reachable import find_reachable_state

D = torch.float64
SCALE = torch.tensor(1.5, dtype=D)
FLAG = torch.tensor(False)
CONFIG = types.SimpleNamespace(scale=torch.tensor(1.5, dtype=D))
TABLE = {"rows": [torch.ones(8, dtype=D)]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * SCALE * TABLE["rows"][0]
        return self.last(x.tanh() if bool(FLAG) else x) * CONFIG.scale


class InClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = scaling(SCALE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x)))


def scaling(by: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def write() -> None:
    SCALE.add_(0.5)
    TABLE["rows"][0].mul_(1.1)


def assign() -> None:
    global SCALE
    SCALE = torch.tensor(SCALE.item() + 1, dtype=D)


def assign_in_containers() -> None:
    CONFIG.scale = CONFIG.scale + 0.25
    TABLE["rows"] = [TABLE["rows"][0] * 2]


def flip() -> None:
    FLAG.logical_not_()


def call() -> Arguments:
    return (torch.randn(4, 8, dtype=D),)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [write, assign, assign_in_containers, flip])
def test_the_present_values_are_used(change: Callable[[], None], way: str) -> None:
    assert_equal_calls(Net, [call] * 3, way, between=change)


def test_a_deep_copy_uses_the_variables_too() -> None:
    net = Net().double()
    placed = copy.deepcopy(compile_way(net, call(), "stages"))
    for change in (write, assign):
        (x,) = call()
        change()
        assert torch.allclose(placed(x), net(x))


def test_a_tensor_in_a_closure() -> None:
    assert_equal_calls(InClosure, [call] * 3, between=write)


# Plain values: what a call uses is what the plain model would read then.

RATE = 2.0
STEPS = 3
SETTINGS: dict[str, Any] = {
    "scale": 2.0,
    "deep": {"act": "tanh"},
    "layers": [1, 1],
    "function": F.gelu,
}
OPTIONS = types.SimpleNamespace(scale=2.0, inner=types.SimpleNamespace(flag=False))


class Options:
    scale = 2.0


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * RATE * self.factor() + SETTINGS["scale"]
        for _ in SETTINGS["layers"]:
            x = x + Options.scale
        x = SETTINGS["function"](x) if OPTIONS.inner.flag else x * OPTIONS.scale
        return self.last(getattr(x, SETTINGS["deep"]["act"])())

    def factor(self) -> int:
        return STEPS


def put_rate(value: float) -> None:
    global RATE
    RATE = value


def put_steps(value: float) -> None:
    global STEPS
    STEPS = int(value)


def put_scale(value: float) -> None:
    SETTINGS["scale"] = value


def put_class(value: float) -> None:
    Options.scale = value


def put_object(value: float) -> None:
    OPTIONS.scale = value


def put_flag(value: float) -> None:
    OPTIONS.inner.flag = value % 2 > 1


def put_function(value: float) -> None:
    OPTIONS.inner.flag, SETTINGS["function"] = True, F.relu if value > 3 else F.gelu


def put_list(value: float) -> None:
    SETTINGS["layers"] = [1] * (int(value) % 3)


def put_string(value: float) -> None:
    SETTINGS["deep"] = {"act": "tanh" if int(value) % 2 else "sigmoid"}


PUTS = (
    *(put_rate, put_steps, put_scale, put_class, put_object),
    *(put_flag, put_function, put_list, put_string),
)


@pytest.fixture(autouse=True)
def _values_restored() -> Iterator[None]:
    here = globals()
    plain = {name: copy.deepcopy(here[name]) for name in ("RATE", "STEPS", "SETTINGS", "OPTIONS")}
    yield
    here.update(plain)
    Options.scale = 2.0


@pytest.mark.matrix(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("put", PUTS)
def test_a_plain_value_that_is_another_now(put: Callable[[float], None], way: str) -> None:
    values = itertools.cycle([2.5, 3.5, 3.5, 4.5, 7.25, 2.5])
    assert_equal_calls(Plain, [call] * 6, way, between=lambda: put(next(values)))


ACTIVATION: Callable[[Tensor], Tensor] = torch.relu


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return 2 * x


class Calls(Net):
    def __init__(self) -> None:
        super().__init__()
        self.doubles = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        x = self.doubles(ACTIVATION(self.first(x)))
        return self.last(x)


@pytest.mark.parametrize(
    ("holder", "name", "function"),
    [
        (sys.modules[__name__], "ACTIVATION", torch.tanh),
        (sys.modules[__name__], "ACTIVATION", F.leaky_relu),
        (sys.modules[__name__], "ACTIVATION", functools.partial(F.leaky_relu, negative_slope=0.5)),
        (Doubles, "scaled", lambda self, x: 5 * x),
        (Doubles, "forward", lambda self, x: 7 * x),
    ],
)
def test_a_function_that_is_another_now(
    holder: Any, name: str, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.chain([None, None], itertools.repeat(function))

    def replace_it() -> None:
        if (new := next(turns)) is not None:
            monkeypatch.setattr(holder, name, new)

    assert_equal_calls(Calls, [call] * 3, between=replace_it)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("put", PUTS[:5])
def test_a_number_that_is_another_in_every_call_is_not_captured_for_each(
    put: Callable[[float], None],
) -> None:
    net = Plain().double()
    placed = compile_way(net, call(), "stages")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecaptureWarning)
        for value in range(3, 16):
            put(value + 0.5)
            (x,) = call()
            assert torch.allclose(placed(x), net(x))


class Left(Net):
    """Leaves values in a global object, and counts in a dict."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        RESULTS.calls += 1
        RESULTS.inner.mean = x.mean(1)
        RESULTS.log.append(x.detach())
        COUNTS["calls"] += 2
        return self.last(x)


class Inner:
    mean: Tensor | None = None


class Results:
    def __init__(self) -> None:
        self.calls, self.inner, self.log = 0, Inner(), list[Tensor]()


RESULTS = Results()
COUNTS = {"calls": 0}


@pytest.mark.parametrize("way", ["stages", "micro-batches"])
def test_what_forward_leaves_in_an_object_of_its_code(way: str) -> None:
    net = Left().double()
    placed = compile_way(net, call(), way)
    for model in (net, placed, placed):
        (x,) = call()
        RESULTS.calls, COUNTS["calls"] = 5, 1
        RESULTS.log.clear()
        model(x).sum().backward()
        assert (RESULTS.calls, COUNTS["calls"]) == (6, 3)
        assert torch.allclose(RESULTS.inner.mean, net.first(x).mean(1))  # type: ignore[arg-type]
        assert RESULTS.inner.mean.grad_fn is not None  # type: ignore[union-attr]
        assert torch.allclose(torch.cat(RESULTS.log), net.first(x))


class MadeAtFirst(Net):
    """Makes a buffer and a list in a variable at its first call, and reads both in later ones."""

    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(LOCAL, "stack"):
            LOCAL.stack = []
        if self.bias is None:
            self.bias = torch.arange(8, dtype=x.dtype)
        LOCAL.stack.append(1)
        x = self.first(x) + self.bias[: x.shape[1]]
        LOCAL.stack.pop()
        return self.last(x)


LOCAL = threading.local()


@pytest.mark.parametrize("way", ["stages", "micro-batches"])
def test_what_the_first_call_makes_in_the_model_and_in_a_variable(way: str) -> None:
    vars(LOCAL).clear()
    assert_equal_calls(MadeAtFirst, [call, call, call], way, between=vars(LOCAL).clear)
    assert LOCAL.stack == []


def test_variables_are_guarded_though_a_tool_takes_over_the_trace() -> None:
    """As the one of coverage does, which installs itself anew whenever it is called."""

    def tool(frame: Any, event: Any, arg: Any) -> None:
        sys.settrace(tool)

    net, before = Plain().double(), sys.gettrace()
    sys.settrace(tool)
    try:
        placed = compile_way(net, call(), "one device")
    finally:
        sys.settrace(before)
    put_rate(7.5)
    (x,) = call()
    assert torch.allclose(placed(x), net(x))


def remembered(
    x: Tensor,
    seen: list[Tensor] = [],  # noqa: B006
    *,
    memo: dict[str, Any] = {},  # noqa: B006
) -> Tensor:
    """Keeps what it gets in its own defaults."""
    seen.append(x.detach())
    memo["mean"] = x.mean(1)
    return x * 2


class Remembers(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(remembered(self.first(x)))


@pytest.mark.parametrize("way", ["stages", "micro-batches"])
def test_what_forward_leaves_in_the_defaults_of_a_function(way: str) -> None:
    net = Remembers().double()
    (seen,), memo = remembered.__defaults__ or (), (remembered.__kwdefaults__ or {})["memo"]
    placed = compile_way(net, call(), way)
    assert not seen
    assert not memo, "recording leaves nothing"
    for _ in range(2):
        (x,) = call()
        expected = net(x)
        seen.clear()
        torch.testing.assert_close(placed(x), expected)
        torch.testing.assert_close(torch.cat(seen), net.first(x).detach())
        torch.testing.assert_close(memo["mean"], net.first(x).mean(1))
    seen.clear()
    memo.clear()


@torch.no_grad()
def noted(x: Tensor) -> Tensor:
    """Torch's decorator holds it in a closure."""
    RESULTS.log.append(x.mean(1))
    return x * 2


@contextlib.contextmanager
def doubled(x: Tensor) -> Iterator[Tensor]:
    """Python's decorator holds it in a closure."""
    RESULTS.log.append(x.detach().mean(1))
    yield x * 2


class Notes(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with doubled(x) as twice:
            return self.last(twice + noted(x))


@pytest.mark.parametrize("way", ["stages", "micro-batches"])
def test_what_functions_under_decorators_leave(way: str) -> None:
    net = Notes().double()
    RESULTS.log.clear()
    placed = compile_way(net, call(), way)
    assert not RESULTS.log, "recording leaves nothing"
    (x,) = call()
    torch.testing.assert_close(placed(x), net(x))
    torch.testing.assert_close(RESULTS.log[:2], RESULTS.log[2:])


class Asserts(Net):
    def forward(self, x: Tensor) -> Tensor:
        assert x.max().item() < 1e9
        return super().forward(x)

    def patch(self) -> Any:
        return OF_A_TOOL()


OF_A_TOOL = pytest.MonkeyPatch


def test_the_code_of_packages_without_torch_is_not_searched() -> None:
    """Pytest rewrites the assertion to call itself; all of pytest's state would follow.

    Nor are classes of such packages: a thread of tqdm's sets attributes of an object in one of its classes.
    """
    found = find_reachable_state(Asserts())
    assert f"{__name__}.SCALE" in {each.name for each in found.variables}
    for each in found.variables:
        of_class = isinstance(each.holder, type) and each.holder.__module__
        assert not (of_class or each.name).startswith("_pytest"), each


def test_functions_that_an_attribute_holds_close_over_a_list_and_a_tensor() -> None:
    dims, weight = [1], torch.rand(2, 1)
    model = nn.Sequential(nn.Linear(3, 2))
    held = [lambda x: x.sum(dims, keepdim=True), lambda x: x * weight[:, 0]]

    class Calls(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = [function]

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.function[0](x)
            return result

    model.extend(map(Calls, held))
    x = torch.randn(4, 3)
    placed = placer.compile(model, {"devices": ["cpu:0"]}, x)
    torch.testing.assert_close(placed(x), model(x))
