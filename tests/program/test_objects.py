"""Results that are objects of classes made inside of a function, which pickle does not find; keys by id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn

import placer


def test_a_class_of_a_function() -> None:
    @dataclass
    class Output:
        logits: Tensor
        hidden: list[Tensor]
        name: str = "net"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Output:
            hidden = self.first(x)
            return Output(self.last(hidden), [hidden])

    model, x = Net().double(), torch.randn(4, 4, dtype=torch.float64)
    layers = {"first": "cpu:0", "last": "cpu:1"}
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers, "microbatches": 2}
    placed = placer.compile(model, spec, x)
    found, wanted = placed(x), model(x)
    assert type(found) is Output and found.name == "net"
    assert_close(found.logits, wanted.logits, "logits")
    assert_close(found.hidden[0], wanted.hidden[0], "hidden")
    placed.step(x, loss_fn=lambda output: output.logits.square().mean())
    wanted.logits.square().mean().backward()
    assert_close(placed.get_parameter("first.weight").grad, model.first.weight.grad, "gradient")


@dataclass
class Named:
    logits: Tensor
    hidden: Tensor


class Plain:
    def __init__(self, logits: Tensor, hidden: Tensor) -> None:
        self.logits, self.hidden = logits, hidden


class Returns(nn.Module):
    """Two results, put together by ``pack``."""

    def __init__(self, pack: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.first, self.last, self.pack = nn.Linear(4, 4), nn.Linear(4, 2), pack

    def forward(self, x: Tensor) -> object:
        hidden = self.first(x).tanh()
        return self.pack(self.last(hidden), hidden.exp())


def _training_bytes(pack: Callable[[Tensor, Tensor], object]) -> tuple[int, int]:
    """Saved and peak bytes of a training step as planned; the dry run must find the same peak."""
    model, x = Returns(pack), torch.randn(4096, 4)
    plan = placer.make_plan(model, {"devices": ["cuda:0"]}, x)
    (device,) = placer.simulate(model, plan, x).devices
    assert device.peak == plan.devices[0].peak
    return plan.stages[0].memory.saved, plan.devices[0].peak


def test_a_loss_is_taken_to_read_the_tensors_of_an_object() -> None:
    wanted = _training_bytes(lambda logits, hidden: (logits, hidden))
    assert _training_bytes(Named) == wanted
    assert _training_bytes(Plain) == wanted
    assert _training_bytes(lambda logits, hidden: (logits, Named(logits, hidden))) == wanted


def test_no_loss_is_taken_to_read_a_cache_beside_the_result() -> None:
    beside = _training_bytes(lambda logits, hidden: (logits, Plain(logits.detach(), hidden)))
    assert beside < _training_bytes(lambda logits, hidden: (logits, hidden))


class Inside(nn.Module):
    """A module that stays whole, since it reads a value, and returns tensors in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Named]:
        hidden = self.first(x).tanh()
        hidden = hidden * 2 if hidden.sum() > 1e9 else hidden + 1
        return hidden, Named(hidden, self.second(hidden).tanh())


class ReadsFields(nn.Module):
    """It reads what another module returned in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(4, 4), Inside()
        self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, named = self.inside(self.before(x))
        return self.last(self.middle(hidden) * named.hidden + named.logits)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fields_of_a_dataclass_go_to_the_stage_that_reads_them(device: str) -> None:
    model, x = ReadsFields().double(), torch.randn(4, 4, dtype=torch.float64)
    names = [f"{device}:{i}" for i in range(4)]
    layers = dict(zip(("before", "inside", "middle", "last"), names, strict=True))
    placed = placer.compile(model, {"devices": names, "layers": layers}, x, run_on="cpu")
    assert [set(stage.devices) for stage in placed.plan.stages] == [{name} for name in names]
    placed.step(x, loss_fn=lambda output: output.square().mean())
    found = {name: parameter.grad for name, parameter in placed.named_parameters()}
    wanted = model(x)
    wanted.square().mean().backward()
    assert_close(placed(x), wanted, "result")
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter.grad, name)
    placer.simulate(model, placed.plan, x)  # raises if an operation has tensors of two devices


class Lazy(nn.Module):
    """It returns what cannot be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> object:
        return (layer(x) for layer in [self.layer])


def test_what_cannot_be_kept_is_said_and_not_blamed_on_the_inputs() -> None:
    with pytest.raises(placer.CaptureError, match="returns an object of type generator") as error:
        placer.compile(Lazy(), {"devices": ["cpu:0"]}, torch.ones(2, 4))
    assert "example inputs" not in str(error.value)


class ById(nn.Module):
    """It finds what belongs to its layers and parameters by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scales = {id(self.a): 2.0, id(self.b.weight): 3.0}

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.scales.get(id(self.a), 1.0)
        return self.b(x) * self.scales.get(id(self.b.weight), 1.0)


def test_a_dict_by_the_ids_of_layers_is_that_of_the_copy() -> None:
    model, x = ById(), torch.randn(4, 4)
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, x)
    torch.testing.assert_close(placed(x), model(x))
    assert list(model.scales) == [id(model.a), id(model.b.weight)]


class Descriptor(type):
    """A metaclass as Cython makes them: its own ``__module__`` is a descriptor."""

    __module__ = property(lambda cls: __name__)  # type: ignore[assignment]


SCALE = Descriptor("Scale", (), {"by": 2.0})()


def test_a_metaclass_whose_module_is_a_descriptor() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * SCALE.by

    net, x = nn.Sequential(Scaled(4, 4), nn.Linear(4, 2)).double(), torch.randn(3, 4).double()
    placed = placer.compile(net, {"devices": ["cpu:0", "cpu:1"], "layers": {}}, x, run_on="cpu")
    assert torch.equal(placed(x), net(x))
