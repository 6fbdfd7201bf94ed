"""``verify`` notices when a placed model no longer leaves behind what ``forward`` does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from kinds import WIDTH, Chain, D, Part, rows
from torch import Tensor, nn

import placer
from placer.executor import runtime


def _stores(self: Any, x: Tensor, y: Tensor, cache: Tensor) -> None:
    self.loss = y.square().mean()


def _writes(self: Any, x: Tensor, y: Tensor, cache: Tensor) -> Tensor:
    cache.copy_(y.detach())
    return y + cache


def _evaluates(self: Any, x: Tensor, y: Tensor, cache: Tensor) -> Tensor:
    self.norm.eval()
    result: Tensor = self.norm(y)
    return result


def _freezes(self: Any, x: Tensor, y: Tensor, cache: Tensor) -> Tensor:
    self.last.weight.requires_grad_(False)
    result: Tensor = self.last(y)
    return result


def _averages(self: Any, x: Tensor, y: Tensor, cache: Tensor) -> None:
    self.mean = 0.5 * self.mean.detach() + self.linear.weight.mean(0)


LEFT: dict[str, tuple[Callable[..., Tensor | None], Callable[[Any], bool]]] = {
    "attribute of layers.2.loss": (_stores, lambda each: each.path[-1] == "loss"),
    "input of others[0]": (_writes, lambda each: each.kind == "write"),
    "mode of layers.2.norm": (_evaluates, lambda each: each.path[-1] == "training"),
    "requires_grad of layers.2.last.weight": (
        _freezes,
        lambda each: each.kind == "requires_grad",
    ),
    "buffer of layers.2.mean": (_averages, lambda each: "_buffers" in each.path),
}


def _leave_out(patch: pytest.MonkeyPatch, wanted: Callable[[Any], bool]) -> None:
    """Let calls leave behind nothing of which ``wanted`` is true."""
    store, set_flags = runtime.store, runtime.set_flags

    def some(stored: Any, leaves: Any, target: Any) -> Any:
        kept, values, rest = [], [], list(leaves)
        for each in stored:
            own, rest = rest[: each.count], rest[each.count :]
            if not wanted(each):
                kept.append(each)
                values += own
        return store(kept, values, target)

    patch.setattr(runtime, "store", some)
    others = lambda stored: [each for each in stored if not wanted(each)]  # noqa: E731
    patch.setattr(runtime, "set_flags", lambda stored, target: set_flags(others(stored), target))


@pytest.mark.parametrize("named", LEFT)
def test_verify_finds(named: str) -> None:
    torch.manual_seed(0)
    act, wanted = LEFT[named]
    part = Part(act)
    part.loss, part.norm, part.last = None, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    part.register_buffer("mean", torch.zeros(WIDTH))
    model, example = Chain(Random(0), part).to(D), (rows(6), rows(6))
    spec = {"devices": ["cpu:0", "cpu:1"]}
    with pytest.MonkeyPatch.context() as patch:
        _leave_out(patch, wanted)
        without = placer.verify(model, spec, copy.deepcopy(example))
    assert not without.ok
    assert named in {str(c).partition(":")[0] for c in without.different}, without
    assert placer.verify(model, spec, example).ok
