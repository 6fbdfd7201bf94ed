"""A buffer that forward replaces gets a new tensor: what the caller kept of it stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

SPECS: list[dict[str, Any]] = [{}, {"replicas": 2}]


class Counts(nn.Module):
    """Two layers and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("last", torch.ones(4))


class Replaces(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.b(self.a(x) * self.calls)


class Registers(Counts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.register_buffer("calls", 0.5 * self.calls + self.a.weight.detach().sum(0))
        return self.b(y * self.calls)


class Shifts(Counts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * self.calls + self.last
        self.last, self.calls = self.calls, self.calls + 1
        return self.b(y)


class Holds(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x if self[0].calls is None else self[0].a(x * self[0].calls)


def test_a_buffer_of_a_container_may_become_none() -> None:
    model, x = Holds(Counts()), torch.randn(4, 4)
    placed = placer.compile(copy.deepcopy(model), {"devices": ["cpu"]}, x)
    for calls in (torch.ones(4), None, torch.ones(4)):
        model[0].calls = placed[0].calls = calls
        torch.testing.assert_close(placed(x), model(x))


class Swaps(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.last, self.calls = self.calls, self.last
        return self.b(self.a(x) * self.calls)


class ThenInPlace(Counts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.calls = self.calls + 1
        self.calls.mul_(2)
        return self.b(y * self.calls.clone())


class OnlyInPlace(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x) * self.calls.clone())


def _seen(model: nn.Module, x: Tensor, *, step: bool) -> dict[str, Any]:
    kept, state = dict(model.named_buffers()), model.state_dict()
    model.zero_grad()
    if step and isinstance(model, placer.PlacedModule):
        model.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
    else:
        model(x).square().mean().backward()
    found: dict[str, Any] = {f"new {n}": b.clone() for n, b in model.named_buffers()}
    for name, buffer in kept.items():
        found[f"kept {name}"] = buffer.clone()
        found[f"in the state_dict {name}"] = state[name].clone()
        found[f"is {name} the same"] = model.get_buffer(name) is buffer
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("step", [False, True], ids=["call", "step"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("make", [Replaces, Registers, Shifts, Swaps, ThenInPlace, OnlyInPlace])
def test_what_the_caller_kept_stays(
    make: type[nn.Module], spec: dict[str, Any], *, step: bool
) -> None:
    model = make().double()
    example = torch.randn(4, 4, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(model), {"devices": ["cpu:0", "cpu:1"], **spec}, example)
    for _ in range(3):
        x = torch.randn_like(example)
        torch.testing.assert_close(_seen(placed, x, step=step), _seen(model, x, step=step))


class WritesBoth(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.calls.mul_(2)
        self.calls = self.calls + 1
        return self.b(self.a(x))


class OneOfTwo(nn.Module):
    """Two layers that share a buffer, until forward replaces it in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Replaces(), Replaces()
        self.second.calls = self.first.calls

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.second.calls + self.first.calls
        self.second.calls = self.second.calls + 1
        return self.first.b(x)


@pytest.mark.parametrize("make", [WritesBoth, OneOfTwo])
def test_or_refused_where_its_tensor_is_also_written_or_shared(make: type[nn.Module]) -> None:
    with pytest.raises(placer.CaptureError, match="whose tensor it also writes or shares"):
        placer.compile(make(), {"devices": ["cpu:0", "cpu:1"]}, torch.randn(4, 4))
