"""A forward hook that keeps something is refused with several slices; any other runs once for every slice."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer

SPEC = {"devices": ["cuda:0", "cuda:1"], "layers": {"0": "cuda:0", "1": "cuda:0", "2": "cuda:1"}}
SLICES: dict[str, dict[str, Any]] = {
    "replicas": {"devices": [f"cuda:{i}" for i in range(4)], "replicas": 2},
    "micro-batches": {"microbatches": 2},
}
Hook = Callable[[nn.Module, Any, Tensor], None]


class Keeper:
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def store(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept["output"] = output

    def count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept["calls"] = self.kept.get("calls", 0) + 1


class Counter(Keeper):
    __call__ = Keeper.count


class Module(nn.Module):
    """A module outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    store = Keeper.store


def _store(kept: dict[str, Any], module: nn.Module, args: Any, output: Tensor) -> None:
    kept["output"] = output.detach()


def _closure() -> tuple[Hook, dict[str, Any]]:
    kept: dict[str, Any] = {}

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        kept["output"] = output

    return hook, kept


def _partial() -> tuple[Hook, dict[str, Any]]:
    kept: dict[str, Any] = {}
    return functools.partial(_store, kept), kept


def _bound(kind: type[Any], name: str) -> tuple[Hook, dict[str, Any]]:
    owner = kind()
    return getattr(owner, name), owner.kept


def _object() -> tuple[Hook, dict[str, Any]]:
    owner = Counter()
    return owner, owner.kept


KEEPS: dict[str, Callable[[], tuple[Hook, dict[str, Any]]]] = {
    "closure": _closure,
    "partial": _partial,
    "method that stores": lambda: _bound(Keeper, "store"),
    "method that counts": lambda: _bound(Keeper, "count"),
    "method of a module": lambda: _bound(Module, "store"),
    "object": _object,
}


def _net(hook: Hook) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    net = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6)).double()
    net[1].register_forward_hook(hook)
    return net, torch.randn(8, 6, dtype=torch.float64)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("kind", KEEPS)
def test_one_that_keeps_something_is_refused_with_several_slices(kind: str, slices: str) -> None:
    hook, kept = KEEPS[kind]()
    net, x = _net(hook)
    with pytest.raises(placer.CaptureError, match="is set by a module that stays whole"):
        placer.compile(net, {**SPEC, **SLICES[slices]}, x, run_on="cpu")
    assert not kept


def test_one_that_logs_is_not_recorded_again_in_every_call() -> None:
    log: list[float] = []
    net, x = _net(lambda module, args, output: log.append(output.detach().mean().item()))
    placed = placer.compile(net, SPEC, x, run_on="cpu")
    for _ in range(10):  # the eighth recording would be a warning
        placed(x)
    assert len(log) == 10


@pytest.mark.parametrize("slices", SLICES)
def test_one_that_only_reads_or_returns_runs_once_for_every_slice(slices: str) -> None:
    class Reader:
        factor = 2.0

        def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return self.factor * output

    net, x = _net(Reader().hook)
    placed = placer.compile(copy.deepcopy(net), {**SPEC, **SLICES[slices]}, x, run_on="cpu")
    torch.testing.assert_close(placed(x), net(x))


class Own(nn.Sequential):
    """Stores on the model itself what a layer returns."""

    def store(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.output = output


def test_what_a_method_of_the_model_stores_is_joined() -> None:
    net = Own(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 6)).double()
    net[1].register_forward_hook(net.store)
    x = torch.randn(8, 6, dtype=torch.float64)
    placed: Any = placer.compile(net, {**SPEC, "microbatches": 2}, x, run_on="cpu")
    placed(x)
    net(x)
    torch.testing.assert_close(placed.output, net.output)
