"""The caller's model after a capture, above all one that failed: exactly as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from placer.program import Program, lower


class Busy(nn.Module):
    """Changes whatever a forward can change in its modules, and then does what ``end`` does."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.inner[1].weight.requires_grad_(False)
        self.inner[0].register_forward_hook(lambda module, args, result: result * 2)
        self.inner[2].eval()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[Any] = []
        self.table = {"last": 0}
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.table["last"] = len(self.seen)
        self.new = x
        self.inner[2].train()
        self.inner[0].weight.requires_grad_(False)
        self.inner[1].running_mean = torch.ones(4)
        self.handle = self.register_forward_hook(lambda module, args, result: result)
        random.random()
        np.random.rand()
        return self.end(self.inner(x) + torch.rand_like(x))


def fail(x: Tensor) -> Tensor:
    raise ValueError("not today")


def wrong_shapes(x: Tensor) -> Tensor:
    return x @ torch.ones(5, 5)


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def interrupt(x: Tensor) -> Tensor:
    raise KeyboardInterrupt


def state(model: nn.Module) -> dict[str, Any]:
    """All that there is to a model, by identity and by value, and the world around it."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            found[f"{path}.{name}"] = value
            if isinstance(value, dict):
                found[f"{path}.{name} items"] = [(k, id(v)) for k, v in value.items()]
            if isinstance(value, list):
                found[f"{path}.{name} items"] = list(map(id, value))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"data of {name}"] = tensor.detach().clone()
        found[f"version of {name}"] = tensor._version
        found[f"requires_grad of {name}"] = tensor.requires_grad
        found[f"grad of {name}"] = tensor.grad
    found["random"] = random.getstate()
    found["numpy"] = np.random.get_state()[1].tobytes()
    found["torch"] = torch.get_rng_state()
    found["grad mode"] = torch.is_grad_enabled()
    found["autocast"] = torch.is_autocast_enabled("cpu")
    found["calls of modules"] = nn.Module.__call__
    found["conversion"] = nn.Module._apply
    found["functions"] = torch.autograd.Function.__dict__["apply"]
    found["default device"] = torch.get_default_device()
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    return a is b or bool(a == b)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("end", [fail, wrong_shapes, through_numpy, interrupt, torch.relu])
@pytest.mark.parametrize("nested", [False, True])
def test_the_model_is_as_it_was(end: Callable[[Tensor], Tensor], nested: bool) -> None:
    model: nn.Module = Busy(end)
    if nested:
        model = nn.Sequential(nn.Linear(4, 4), model)
    x = torch.randn(6, 4)
    before = state(model)
    captured: Program | None = None
    try:
        captured = lower(model, (x,))
    except placer.CaptureError as error:
        assert end in (fail, wrong_shapes) or (not nested and "it sets new" in str(error)), error
    except KeyboardInterrupt:
        assert end is interrupt
    # A model that is a single node may not change what its callers can see.
    assert (captured is None) == (not nested or end in (fail, wrong_shapes, interrupt))
    after = state(model)
    assert list(after) == list(before)
    assert [name for name in before if not same(before[name], after[name])] == []


SEEN: ContextVar[Any] = ContextVar("SEEN")


class Notes(nn.Module):
    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.linear, self.decides = nn.Linear(4, 4), decides

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        SEEN.set("seen")
        return -x if self.decides and x.sum() > 0 else x


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_context_variable_without_a_value_has_none_afterwards(
    *, decides: bool, nested: bool
) -> None:
    model: nn.Module = Notes(decides=decides)
    model = nn.Sequential(model, nn.Linear(4, 4)) if nested else model

    def try_it() -> None:
        placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, torch.randn(4, 4))
        assert SEEN.get("nothing") == "nothing"
        placed(torch.randn(4, 4))
        assert SEEN.get("nothing") == "seen"

    copy_context().run(try_it)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_told_to_be_run_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(placer.CaptureError, match="lazy module") as caught:
        placer.make_plan(model, {"devices": ["cpu:0"]}, torch.randn(6, 4))
    assert caught.value.where == "1.weight"
    assert "run the model once" in caught.value.remedy
    assert nn.parameter.is_lazy(model[1].weight)
    model(torch.randn(6, 4))
    placer.make_plan(model, {"devices": ["cpu:0", "cpu:1"]}, torch.randn(6, 4))
