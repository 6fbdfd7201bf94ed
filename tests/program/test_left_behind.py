"""What forward leaves in objects that its code can reach: every call leaves what the plain model would.

Each model here keeps it somewhere else. What depends on an earlier call in a way that a program cannot repeat
is refused.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from array import array
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from other_inputs import WAYS, compile_way
from torch import Tensor, nn

import placer

D = torch.float64


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        batch["out"] = self.layer(batch["x"])
        batch["early"] = batch["out"] * 2
        result: Tensor = batch["early"] + 1
        return result


def test_entries_of_a_dict_are_in_the_order_in_which_forward_adds_them() -> None:
    placed = placer.compile(Adds(), {"devices": ["cpu:0"]}, ({"x": torch.ones(2, 4)},))
    batch = {"x": torch.ones(2, 4)}
    placed(batch)
    assert list(batch) == ["x", "out", "early"]


class Net(nn.Module):
    """A model whose subclasses keep something of ``x`` before they return the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.keep(x)
        return self.last(x)

    def keep(self, x: Tensor) -> None:
        raise NotImplementedError


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*args: Any) -> Any:
        counting.calls += 1  # type: ignore[attr-defined]
        return function(*args)

    counting.calls = 0  # type: ignore[attr-defined]
    return counting


def note(x: Tensor) -> None:
    note.last = x.detach()  # type: ignore[attr-defined]
    note.calls = getattr(note, "calls", 0) + 1  # type: ignore[attr-defined]


class FunctionAttributes(Net):
    @counted
    def keep(self, x: Tensor) -> None:
        note(x)


HISTORY: list[Tensor] = []
WEIGHTS: list[float] = []


class PropertySetter(Net):
    features = property()

    @features.setter
    def features(self, value: Tensor) -> None:
        HISTORY.append(value.detach())

    @features.deleter
    def features(self) -> None:
        HISTORY.append(torch.zeros(()))

    @functools.cached_property
    def weight(self) -> float:
        WEIGHTS.append(1.0)
        return 1.0

    def keep(self, x: Tensor) -> None:
        self.features = x * self.weight
        del self.features


class Registered(type):
    made: list[Any] = []  # noqa: RUF012
    count = 0

    def __call__(cls, *args: Any) -> Any:
        Registered.made.append(args)
        Registered.count += 1
        return super().__call__(*args)


class Result(metaclass=Registered):
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Metaclass(Net):
    def keep(self, x: Tensor) -> None:
        Result(x.detach())


COUNTS: Counter[str] = Counter()
ORDERED: OrderedDict[str, int] = OrderedDict()
CHAIN: ChainMap[str, int] = ChainMap({}, {"step": 2})
WAITING: queue.Queue[Tensor] = queue.Queue()
LOCAL = threading.local()
LOCAL.mean = None


class LibraryContainers(Net):
    def keep(self, x: Tensor) -> None:
        COUNTS["calls"] += 1
        ORDERED["calls"] = ORDERED.get("calls", 0) + 1
        CHAIN["calls"] = CHAIN.get("calls", 0) + CHAIN["step"]
        WAITING.put(x.detach())
        LOCAL.mean = x.mean(1)


NOTES: list[int] = []


class FirstCallOnly(Net):
    def keep(self, x: Tensor) -> None:
        if not NOTES:
            NOTES.append(x.size(1))


# What each keeps; not in its class, where the search for what forward reaches would find it.
KEPT: dict[type[Net], Callable[[], Any]] = {
    FunctionAttributes: lambda: (FunctionAttributes.keep.calls, vars(note)),  # type: ignore[attr-defined]
    PropertySetter: lambda: (HISTORY, WEIGHTS),
    FirstCallOnly: lambda: NOTES,
    Metaclass: lambda: (Registered.made, Registered.count),
    LibraryContainers: lambda: (COUNTS, ORDERED, CHAIN.maps, [*WAITING.queue], LOCAL.mean),
}


def copied(value: Any) -> Any:
    """The tensors and numbers in ``value``, as they are now."""
    if isinstance(value, dict):
        return {key: copied(x) for key, x in value.items() if key != "__wrapped__"}
    if isinstance(value, list | tuple):
        return [copied(x) for x in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


def empty() -> None:
    for name in ("last", "calls"):
        vars(note).pop(name, None)
    FunctionAttributes.keep.calls = 0  # type: ignore[attr-defined]
    Registered.count, LOCAL.mean = 0, None
    for each in (
        HISTORY,
        WEIGHTS,
        NOTES,
        Registered.made,
        COUNTS,
        ORDERED,
        CHAIN.maps[0],
        WAITING.queue,
    ):
        each.clear()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KEPT)
def test_every_call_leaves_what_the_plain_one_does(kind: Any, way: str) -> None:
    def calls(model: nn.Module) -> list[Any]:
        torch.manual_seed(0)
        seen = []
        for _ in range(3):
            model(torch.randn(4, 8, dtype=D)).sum().backward()
            seen.append(copied(KEPT[kind]()))
        return seen

    empty()
    net = kind().double()
    expected = calls(net)
    empty()
    before = copied(KEPT[kind]())
    vars(net).pop("weight", None)  # what cached_property has kept
    placed = compile_way(net, (torch.randn(4, 8, dtype=D),), way)
    assert copied(KEPT[kind]()) == before, "recording leaves nothing"
    torch.testing.assert_close(calls(placed), expected)
    empty()


def scaled(x: Tensor) -> Tensor:
    return x * scaled.by  # type: ignore[attr-defined, no-any-return]


scaled.by = 1.0  # type: ignore[attr-defined]


class Scaled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(scaled(self.first(x)))


def test_the_present_attribute_of_a_function_is_used() -> None:
    net = Scaled().double()
    (x,) = (torch.randn(4, 8, dtype=D),)
    placed = compile_way(net, (x,), "stages")
    for scale in (2.0, 3.0, 4.0):
        scaled.by = scale  # type: ignore[attr-defined]
        torch.testing.assert_close(placed(x), net(x))


ENTRIES = [0, 0]
PAIR = (0, "")
SEEN: set[int] = set()
FLAG = False
LAZY: list[Tensor] | None = None


class Store:
    only: Store | None = None
    count = 0

    @classmethod
    def get(cls) -> Store:
        if cls.only is None:
            cls.only = cls()
        return cls.only


def entries(x: Tensor) -> None:
    ENTRIES[1] += 1


def pair(x: Tensor) -> None:
    global PAIR
    PAIR = (PAIR[0] + 1, f"{PAIR[1]}.")


def growing(x: Tensor) -> None:
    SEEN.add(len(SEEN))


def toggle(x: Tensor) -> None:
    global FLAG
    FLAG = not FLAG


def only_first(x: Tensor) -> None:
    global FLAG
    if not FLAG:
        HISTORY.append(x.detach())
    FLAG = True


def lazy_list(x: Tensor) -> None:
    global LAZY
    if LAZY is None:
        LAZY = []
    LAZY.append(x.detach())


def lazy_object(x: Tensor) -> None:
    Store.get().count += 1


class Keeps(Net):
    def __init__(self, function: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.function = function

    def keep(self, x: Tensor) -> None:
        self.function(x)


@pytest.mark.parametrize(
    "function", [entries, pair, growing, toggle, only_first, lazy_list, lazy_object]
)
def test_what_depends_on_earlier_calls_is_refused(function: Callable[[Tensor], None]) -> None:
    net = Keeps(function).double()
    with pytest.raises(placer.PlacerError, match="reads in the next call what it has set there"):
        compile_way(net, (torch.randn(4, 8, dtype=D),), "stages")
    assert ([0, 0], (0, ""), set(), False, None, []) == (ENTRIES, PAIR, SEEN, FLAG, LAZY, HISTORY)
    assert Store.only is None


TOTAL = torch.zeros(3, dtype=D)
AVERAGE = torch.zeros(8, dtype=D)


class WritesGlobalTensors(Net):
    """By operators that torch runs on real tensors, even while it runs others on tensors without data."""

    def keep(self, x: Tensor) -> None:
        global LATEST
        TOTAL.add_(1)
        AVERAGE.mul_(0.9).add_(x.detach()[0])
        LATEST = x.detach()


def test_global_tensors_are_written_once_by_each_call() -> None:
    net, (x,) = WritesGlobalTensors().double(), (torch.randn(4, 8, dtype=D),)
    seen = []
    for model in (net, compile_way(net, (x,), "stages")):
        assert "LATEST" not in globals(), "recording leaves no new variable"
        for _ in range(3):
            model(x)
        seen.append([TOTAL.clone(), AVERAGE.clone(), globals().pop("LATEST")])
        TOTAL.zero_()
        AVERAGE.zero_()
        net = WritesGlobalTensors().double()
    torch.testing.assert_close(seen[1], seen[0])


class CountsRows(Net):
    def __init__(self, *, in_tensor: bool) -> None:
        super().__init__()
        self.seen, self.in_tensor = 0, in_tensor

    def keep(self, x: Tensor) -> None:
        if self.in_tensor:
            TOTAL.add_(x.size(0))
        else:
            self.seen += x.size(0)


@pytest.mark.parametrize("in_tensor", [False, True])
def test_a_count_of_rows_is_not_one_of_slices(in_tensor: bool) -> None:
    net, x = CountsRows(in_tensor=in_tensor).double(), torch.randn(4, 8, dtype=D)
    placed = compile_way(net, (x,), "stages")
    placed(x)
    placed(x)
    assert (placed.seen, TOTAL.tolist()) == ((0, [8.0] * 3) if in_tensor else (8, [0.0] * 3))
    TOTAL.zero_()
    for way in ("micro-batches", "replicas"):
        with pytest.raises(placer.CaptureError, match="is stored by forward and has no row"):
            compile_way(net, (x,), way)
    assert not TOTAL.any()


class StoresInLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountsMean() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CountsMean(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.largest = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.largest = x.max()
        return super().forward(x)


def test_the_pattern_for_a_stored_value_is_for_all_layers_of_a_list() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(placer.CaptureError, match=r'"stored": \{"layers\.\*\.largest": "mean"\}'):
        placer.compile(StoresInLayers(), {"devices": ["cpu"], "microbatches": 2}, x)


COUNTED = np.zeros(2)


class CountsInArray(Net):
    def __init__(self, counts: Any) -> None:
        super().__init__()
        self.counts = counts

    def keep(self, x: Tensor) -> None:
        self.counts[0] += x.size(1)


class CountsInGlobalArray(Net):
    def keep(self, x: Tensor) -> None:
        COUNTED[0] += 1


@pytest.mark.parametrize("counts", [np.zeros(2), bytearray(2), array("i", [0, 0])], ids=str)
def test_elements_of_arrays(counts: Any) -> None:
    """The model's own are refused, as a model that stays whole has copies; those of variables count."""
    x = torch.randn(4, 8, dtype=D)
    with pytest.raises(placer.CaptureError, match=r"sets counts.*array"):
        compile_way(CountsInArray(counts).double(), (x,), "stages")
    part = nn.Sequential(CountsInArray(counts), nn.Linear(2, 2)).double()
    placed = compile_way(part, (x,), "stages")
    for model in (placed, placed, CountsInGlobalArray().double()):
        model(x)
    placed_global = compile_way(CountsInGlobalArray().double(), (x,), "stages")
    assert list(placed[0].counts) == [16, 0]  # type: ignore[index, union-attr, operator]
    placed_global(x)
    assert COUNTED.tolist() == [2.0, 0.0]
    COUNTED.fill(0)


class ScaledByArrays(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * float(COUNTED[0]) * BYTES[0]


BYTES = bytearray(b"a")


def test_the_present_elements_of_arrays_in_variables_are_used() -> None:
    model, x = ScaledByArrays().double(), torch.randn(4, 8, dtype=D)
    placed = compile_way(model, (x,), "stages")
    for COUNTED[0], BYTES[0] in ((1, 2), (3, 4)):
        torch.testing.assert_close(placed(x), model(x))


class LastUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: OrderedDict[str, Tensor] = OrderedDict()

    def forward(self, x: Tensor, name: str) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        self.kept[name] = x.detach()
        self.kept.move_to_end(name)
        while len(self.kept) > 2:
            self.kept.popitem(last=False)
        return self.last(x)


@pytest.mark.parametrize("way", WAYS)
def test_entries_of_a_dict_that_forward_moves_to_its_end(way: str) -> None:
    model, x = LastUsed().double(), torch.randn(4, 8, dtype=D)
    placed = compile_way(LastUsed().double(), (x, "a"), way)
    for name in "abbacab":
        model(x, name)
        placed(x, name)
        assert list(placed.kept) == list(model.kept)  # type: ignore[call-overload]


class KeepsGradient(nn.Module):
    gradient: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def save(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(self.save)
        result: Tensor = self.last(x)
        return result


def test_a_hook_on_a_tensor_that_sets_an_attribute() -> None:
    x = torch.randn(4, 8, dtype=D)
    with pytest.raises(placer.CaptureError, match="a hook sets gradient in the backward"):
        compile_way(KeepsGradient().double(), (x,), "stages")
    net = nn.Sequential(KeepsGradient(), nn.Linear(2, 2)).double()
    placed = compile_way(net, (x,), "stages")
    for model in (net, placed):
        model(x).sum().backward()
    kept = placed.get_submodule("0").gradient
    torch.testing.assert_close(kept, net.get_submodule("0").gradient)


STEPS = itertools.count()


class Iterates(Net):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.rates, self.own = iter([1.0, 2.0, 3.0]), own

    def keep(self, x: Tensor) -> None:
        self.step = next(self.rates if self.own else STEPS)


@pytest.mark.parametrize("own", [False, True])
def test_iterators_are_refused(own: bool) -> None:
    with pytest.raises(placer.CaptureError, match="is an iterator, which forward may advance"):
        compile_way(Iterates(own=own).double(), (torch.randn(4, 8, dtype=D),), "stages")


class TiesInForward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)

    def keep(self, x: Tensor) -> None:
        self.other.weight = self.first.weight


def test_parameters_that_forward_ties_are_refused() -> None:
    with pytest.raises(placer.CaptureError, match="tie parameters before forward"):
        compile_way(TiesInForward().double(), (torch.randn(4, 8, dtype=D),), "stages")


class Tags(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x))
        inner = x * 2
        tensor = {"input": x, "result": y, "parameter": self.last.weight, "inner": inner}[
            self.where
        ]
        tensor.tag = self.where  # type: ignore[attr-defined]
        return y if self.where == "result" else y + inner.sum() * 0


@pytest.mark.parametrize("where", ["input", "result", "parameter"])
def test_attributes_of_tensors_that_the_caller_sees_are_refused(where: str) -> None:
    with pytest.raises(placer.CaptureError, match=r"Tags: its forward sets the attribute 'tag'"):
        compile_way(Tags(where).double(), (torch.randn(4, 8, dtype=D),), "stages")


def test_attributes_of_other_tensors_are_not() -> None:
    net = Tags("inner").double()
    x = torch.randn(4, 8, dtype=D)
    torch.testing.assert_close(compile_way(net, (x,), "stages")(x), net(x))
