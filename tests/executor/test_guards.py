"""Guards: attributes set and modules replaced after placing take effect in the next call."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn

import placer
from placer.executor.calls import program_cache as programs

D = torch.float64
_CUTS: list[dict[str, Any]] = [
    {},
    {"replicas": 2, "microbatches": 2, "replica_devices": [["cpu:2", "cpu:3"]]},
]


@dataclass
class Config:
    power: float = 1.0
    gates: dict[str, list[bool]] = field(default_factory=lambda: {"use": [True, False]})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.0
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.shift = torch.zeros(6, dtype=D)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.linear(x))) * self.scale + self.shift


class Whole(Block):
    """Its forward reads values, so it stays whole."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Net(nn.Module):
    temperature = 1.0

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])
        self.config = Config()
        self.choice = torch.tensor([0.0, 1.0], dtype=D)
        self._weight = 1.0
        self.epoch = 0
        self.gains = (1.0, [1.0])

    @property
    def weight(self) -> float:
        return 2 * self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        self._weight = value

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.config.gates["use"][1]:
            x = x + 1
        if self.choice[0] > 0:
            x = x.square()
        if getattr(self, "bonus", None) is not None:
            x = x * self.bonus
        x = x * self.gains[0] * self.gains[1][0]
        return x * self.config.power * self.weight / self.temperature


def _first(model: nn.Module) -> Any:
    return model.get_submodule("blocks.0")


def _set(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda model: setattr(model, name, value)


def _gate(model: Any) -> None:
    model.config.gates["use"][1] = True


def _gain(model: Any) -> None:
    model.gains[1][0] = 2.0


def _choose(model: Any) -> None:
    model.choice[0] = 1.0


def _replace(model: nn.Module) -> None:
    torch.manual_seed(7)
    model.set_submodule("blocks.1", nn.Sequential(nn.Linear(6, 6), nn.ReLU()).double())


def _append(model: Any) -> None:
    torch.manual_seed(7)
    model.get_submodule("blocks").append(Block().double())


_CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "a number of a submodule": lambda model: setattr(_first(model), "scale", 3.0),
    "a number of a layer": lambda model: setattr(_first(model).drop, "p", 0.5),
    "a function": lambda model: setattr(_first(model), "act", torch.relu),
    "a tensor in place": lambda model: _first(model).shift.add_(2.0),
    "another tensor": lambda model: setattr(_first(model), "shift", torch.ones(6, dtype=D)),
    "a tensor of another shape": lambda m: setattr(_first(m), "shift", torch.ones((), dtype=D)),
    "a tensor that is looked at": _choose,
    "a number of the class": _set("temperature", 4.0),
    "a property": _set("weight", 3.0),
    "one that was missing": _set("bonus", 0.5),
    "a field of a config": lambda model: setattr(model.config, "power", 2.0),
    "an entry deep in a config": _gate,
    "a tuple": _set("gains", (2.0, [1.0])),
    "a list in a tuple": _gain,
    "a module": _replace,
    "one module more": _append,
}


def _place(model: nn.Module, fields: dict[str, Any]) -> tuple[placer.PlacedModule, Tensor]:
    layers = {"blocks.0": "cpu:0", "blocks.1": "cpu:1"}
    x = torch.randn(4, 6, dtype=D)
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers, **fields}
    return placer.compile(copy.deepcopy(model), spec, x), x


def _same(placed: placer.PlacedModule, model: nn.Module, x: Tensor) -> None:
    with torch.random.fork_rng():
        _compare(placed, model, x)


def _compare(placed: placer.PlacedModule, model: nn.Module, x: Tensor) -> None:
    results = []
    for module in (placed, model):
        torch.manual_seed(3)
        module.zero_grad()
        results.append(module(x))
        results[-1].square().mean().backward()
    assert_close(*results, "output")
    named = dict(placed.named_parameters())
    assert list(named) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert_close(named[name].grad, parameter.grad, name)
    if not any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
        placed.zero_grad()
        placed.step(x, loss_fn=lambda out: out.square().mean())
        for name, parameter in model.named_parameters():
            assert_close(named[name].grad, parameter.grad, f"{name}, step")


@pytest.mark.matrix(2)
@pytest.mark.parametrize("block", [Block, Whole])
@pytest.mark.parametrize("change", _CHANGES)
def test_changes_after_compile(change: str, block: type[Block]) -> None:
    torch.manual_seed(0)
    model = Net(block).double()
    placed, x = _place(model, {})
    before = placed(x)
    for module in (model, placed):
        _CHANGES[change](module)
    assert not torch.equal(model(x), before)
    _same(placed, model, x)
    _same(copy.deepcopy(placed), model, x)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("change", ["a number of a submodule", "a tensor in place", "a module"])
def test_changes_reach_every_replica(change: str) -> None:
    torch.manual_seed(0)
    model = Net().double()
    placed, x = _place(model, _CUTS[1])
    _same(placed, model, x)
    for module in (model, placed):
        _CHANGES[change](module)
    _same(placed, model, x)


def test_copies_have_attributes_of_their_own() -> None:
    model = Net().double()
    placed, x = _place(model, {})
    twin, other = copy.deepcopy(placed), copy.deepcopy(model)
    for module in (twin, other):
        module.config.power = 5.0
        _first(module).shift.add_(1.0)
    _same(twin, other, x)
    _same(placed, model, x)


def test_a_pickled_module_keeps_what_was_set() -> None:
    model = Net().double()
    placed, x = _place(model, {})
    for module in (model, placed):
        _first(module).scale, module.temperature = 3.0, 2.0  # type: ignore[assignment]
    file = io.BytesIO()
    torch.save(placed, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.temperature == 2.0
    _same(loaded, model, x)


FACTOR = 2.0
SCALED = {"layers": {"linear": "cpu:0", "last": "cpu:1"}}
linear = "a variable with the name of an attribute, which no code reads"


class Scaled(nn.Module):
    """Reads a global number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x) * FACTOR)


def test_a_module_that_reads_a_variable_can_be_pickled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Scaled().double()
    placed, x = _place(model, SCALED)
    pickled = pickle.dumps(placed)
    loaded = pickle.loads(pickled)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    _same(loaded, model, x)
    with pytest.raises(placer.PlanError, match="another model"):
        pickle.loads(pickled)


def test_a_variable_with_the_name_of_an_attribute_is_no_reason_to_record_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Scaled().double()
    placed, x = _place(model, SCALED)
    monkeypatch.setattr(sys.modules[__name__], "linear", "another")
    monkeypatch.setattr(programs, "lower", None)  # it would be called
    _same(placed, model, x)


class TensorsInAttributes(nn.Module):
    """Its forward uses tensors that are not buffers: under two names, in a list, in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first_layer, self.last_layer = nn.Linear(6, 6), nn.Linear(6, 6)
        one, two = torch.ones(6, dtype=D), torch.full((6,), 2.0, dtype=D)
        self.name = self.other_name = one
        self.listed = [one * 3, {"two": two}]
        self.config = Config()
        self.config.gates = {"scale": two}  # type: ignore[dict-item]
        self.signs = self.other_signs = torch.ones(2, dtype=D)
        self.listed_signs = [torch.ones(1, dtype=D)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_layer(x) * self.name + self.listed[0]
        if self.signs[0] > 0:
            x = x.sin()
        if self.listed_signs[0] > 0:
            x = x.cos()
        x = self.last_layer(x) * self.other_name + self.listed[1]["two"]  # type: ignore[index]
        return x * self.config.gates["scale"]  # type: ignore[operator]


_NEW = torch.arange(1.0, 7.0, dtype=D)
_CHANGES_OF_TENSORS: dict[str, Callable[[Any], None]] = {
    "the one name": lambda model: setattr(model, "name", _NEW),
    "the other name": lambda model: setattr(model, "other_name", _NEW),
    "both names": lambda model: (_set("name", _NEW)(model), _set("other_name", _NEW)(model))[0],
    "in place": lambda model: model.name.mul_(_NEW),
    "in a list": lambda model: model.listed.__setitem__(0, _NEW),
    "in a list, in place": lambda model: model.listed[0].mul_(_NEW),
    "in a dict in a list": lambda model: model.listed[1].update(two=_NEW),
    "one of two that were one": lambda model: model.config.gates.update(scale=_NEW),
    "a list": lambda model: setattr(model, "listed", [_NEW, {"two": _NEW * 2}]),
    "looked at": lambda model: setattr(model, "signs", -torch.ones(2, dtype=D)),
    "not looked at": lambda model: setattr(model, "other_signs", -torch.ones(2, dtype=D)),
    "looked at, in a list": lambda model: model.listed_signs[0].neg_(),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("change", _CHANGES_OF_TENSORS)
def test_changes_of_tensors_that_are_not_buffers(change: str) -> None:
    torch.manual_seed(0)
    model = TensorsInAttributes().double()
    x = torch.randn(4, 6, dtype=D)
    layers = {"first_layer": "cpu:0", "last_layer": "cpu:1"}
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"], "layers": layers}, x)
    plain = copy.deepcopy(model)
    _same(placed, plain, x)
    _CHANGES_OF_TENSORS[change](placed)
    _CHANGES_OF_TENSORS[change](plain)
    _same(placed, plain, x)
    _same(placer.compile(model, placed.plan, x), model, x)  # the caller's model is unchanged


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time a placed model's program is looked up again."""
    found: list[int] = []
    find = programs.same_program

    def count(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return find(*args, **kwargs)

    monkeypatch.setattr(programs, "same_program", count)
    return found


def test_what_forward_does_not_read_costs_no_capture(captured: list[int]) -> None:
    placed, x = _place(Net().double(), {})
    placed(x)
    for epoch in range(3):
        placed.epoch = epoch
        placed(x)
    assert placed.epoch == 2 and not captured
    for power in (2.0, 3.0, 2.0):
        placed.config.power = power
        placed(x)
    assert len(captured) == 2


def test_an_attribute_is_deleted_where_it_is() -> None:
    model = Net().double()
    model.bonus = 2.0  # type: ignore[assignment]
    placed, x = _place(model, {})
    for module in (model, placed):
        del module.bonus
    _same(placed, model, x)


def test_plain_attributes_are_read_through_and_methods_are_not() -> None:
    placed, _ = _place(Net().double(), {})
    assert placed.config == Config() and placed.weight == 2.0
    with pytest.raises(AttributeError, match=r"'wieght'$"):
        _ = placed.wieght


class ReadOutside(Net):
    """Reads, itself, an attribute of a module that stays whole."""

    def __init__(self) -> None:
        super().__init__(Whole)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[0].scale  # type: ignore[operator]


class Counting(Whole):
    def forward(self, x: Tensor) -> Tensor:
        self.scale += 1.0
        return super().forward(x)


def test_an_attribute_of_a_module_that_stays_whole_is_read_outside_of_it() -> None:
    net, x = ReadOutside().double(), torch.randn(4, 6, dtype=D)
    plain = copy.deepcopy(net)
    placed = placer.compile(net, {"devices": ["cpu:0", "cpu:1"], "layers": {}}, x, run_on="cpu")
    for scale in (1.0, 2.0, 3.0):
        for model in (plain, placed):
            model.blocks[0].scale = scale
        torch.testing.assert_close(placed(x), plain(x), rtol=1e-10, atol=1e-12)


def test_processes_refuse_that_it_is_changed_by_that_module() -> None:
    net, x = ReadOutside().double(), torch.randn(4, 6, dtype=D)
    net.blocks[0] = Counting().double()
    plain = copy.deepcopy(net)
    spec = {"devices": ["cuda:0", "cuda:1"], "layers": {}}
    with pytest.raises(placer.PlacerError, match=r"blocks\.0\.scale: .* read outside of it"):
        placer.make_plan(net, spec, x, processes=True)
    placed = placer.compile(net, spec, x, run_on="cpu")
    for _ in range(2):
        torch.testing.assert_close(placed(x), plain(x), rtol=1e-10, atol=1e-12)
