"""Layers, parameters and arguments of any name: those that generated code or placer uses too."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn

_SPEC = {"devices": ["cpu:0", "cpu:1"], "layers": {"head": "cpu:1"}, "microbatches": 2}

# Of torch.fx's modules, of generated functions, and of placer's own module.
_NAMES = ("code", "graph", "meta", "stage_device", "device", "torch", "getattr", "boxed_inputs_")
_OWN_NAMES = ("plan", "step", "sampler", "output_device", "_tree", "_run", "_calls")


class Named(nn.Module):
    def __init__(self, layer: str, parameter: str) -> None:
        super().__init__()
        setattr(self, layer, nn.Linear(4, 4))
        self.inner = nn.Module()
        setattr(self.inner, parameter, nn.Parameter(torch.rand(4)))
        self.head = nn.Linear(4, 3)
        self.names = layer, parameter

    def forward(self, x: Tensor) -> Tensor:
        layer, parameter = self.names
        y: Tensor = getattr(self, layer)(x) * getattr(self.inner, parameter)
        return self.head(y)  # type: ignore[no-any-return]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", (*_NAMES, *_OWN_NAMES))
def test_names(name: str) -> None:
    placed = assert_same(Named(name, name).double(), _SPEC, (torch.randn(4, 4).double(),))
    assert placed.get_submodule(name) is placed._modules[name]
    weight = dict(placed.named_parameters())[f"{name}.weight"]
    assert placed.get_parameter(f"{name}.weight") is weight
    assert placed.get_submodule("") is placed


_ODD = (
    "class",
    "None",
    'a"b',
    "it's",
    "two\nlines",
    "back\\slash",
    "x², y",
    "1",
    '"), exit("no"), ("',
)


class OddNames(nn.Module):
    """Layers, parameters, buffers, arguments and keywords of one odd name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.blocks = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
        self.keyed = Keyed()
        self.keyed.register_forward_pre_hook(lambda module, args: None)  # stays whole: one call
        self.inner = nn.Module()
        self.inner.register_parameter(name, nn.Parameter(torch.rand(4)))
        self.inner.register_buffer(name + "_", torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        y = self.blocks[self.name](x) * self.inner.get_parameter(self.name)
        y = self.keyed(y, **{self.name: self.inner.get_buffer(self.name + "_")})
        with torch.no_grad():
            scale = self.blocks[self.name](x)
        return self.head(y * scale + others[self.name])  # type: ignore[no-any-return]


class Keyed(nn.Module):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        (other,) = others.values()
        return x + other


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", _ODD)
def test_names_that_are_not_identifiers(name: str) -> None:
    model = OddNames(name).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    assert_same(model, _SPEC, (x,), {name: torch.randn(4, 4, dtype=torch.float64)})


class Root(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first = nn.Linear(4, 4)
        self.register_parameter(name, nn.Parameter(torch.rand(4)))
        self.register_buffer(f"{name}_seen", torch.zeros(()))
        self.head = nn.Linear(4, 3)

    def forward(self, boxed_inputs_: Tensor) -> Tensor:
        y: Tensor = self.first(boxed_inputs_) * self.get_parameter(self.name)
        return self.head(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ("code", "plan", "step"))
def test_names_of_the_roots_own_parameters(name: str) -> None:
    placed = assert_same(Root(name).double(), _SPEC, (torch.randn(4, 4).double(),))
    assert placed.get_parameter(name) is placed._parameters[name]
    assert placed.get_buffer(f"{name}_seen") is placed._buffers[f"{name}_seen"]
