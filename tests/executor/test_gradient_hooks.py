"""Hooks on the gradients of parameters run once per step, with the gradient of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import placer

_SPECS: dict[str, dict[str, Any]] = {
    "one stage, one slice": {"devices": ["cpu"]},
    "two replicas": {"devices": ["cpu"], "replicas": 2},
    "micro-batches": {"devices": ["cpu:0", "cpu:1"], "microbatches": 2, "schedule": "1F1B"},
    "both": {"devices": ["cpu:0", "cpu:1"], "replicas": 2, "microbatches": 2},
    "a tied parameter": {
        "devices": ["cpu:0", "cpu:1"], "layers": {"tokens": "cpu:0", "out": "cpu:1"}
    },
}  # fmt: skip


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def _step(module: nn.Module, tokens: Tensor) -> None:
    if isinstance(module, placer.PlacedModule):
        module.step(tokens, target=tokens, loss_fn=_loss, reduction="mean")
    else:
        _loss(module(tokens), tokens).backward()


def _pair(spec: dict[str, Any]) -> tuple[placer.PlacedModule, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain = models.TiedTransformer().double().eval()
    tokens = torch.randint(0, 17, (8, 6))
    return placer.compile(copy.deepcopy(plain), spec, tokens), plain, tokens


@pytest.mark.matrix(2)
@pytest.mark.parametrize("spec", _SPECS.values(), ids=_SPECS)
def test_hooks_change_and_see_the_gradient_of_the_whole_batch(spec: dict[str, Any]) -> None:
    """Also where gradients of an earlier step are there already."""
    placed, plain, tokens = _pair(spec)
    seen: dict[str, list[Tensor]] = {"placed": [], "plain": []}
    for name, module in (("placed", placed), ("plain", plain)):
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            parameter.register_hook(lambda gradient: 3 * gradient)
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen[name].append(p.grad.abs().sum())  # type: ignore[misc]
            )
        for _ in range(2):
            _step(module, tokens)
    for (name, found), wanted in zip(placed.named_parameters(), plain.parameters(), strict=True):
        assert_close(found.grad, wanted.grad, name)
    assert len(seen["placed"]) == len(seen["plain"]) > 0
    assert sum(seen["placed"]).item() == pytest.approx(sum(seen["plain"]).item())


@pytest.mark.matrix(2)
@pytest.mark.parametrize("spec", _SPECS.values(), ids=_SPECS)
def test_an_optimizer_may_step_in_a_hook(spec: dict[str, Any]) -> None:
    """As torch's tutorial on saving memory does; Adam's update is not a sum over slices."""
    placed, plain, tokens = _pair(spec)
    for module in (placed, plain):
        for parameter in module.parameters():
            optimizer = torch.optim.Adam([parameter], lr=1e-2)

            def update(parameter: Tensor, optimizer: torch.optim.Adam = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            _step(module, tokens)
    for (name, found), wanted in zip(placed.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is None
        assert_close(found, wanted, name)


def test_hooks_and_gradients_are_put_back_after_a_failure() -> None:
    placed, _, tokens = _pair(_SPECS["both"])
    parameter = placed.get_parameter("norm.weight")
    calls: list[Tensor] = []
    handle = parameter.register_hook(calls.append)
    parameter.grad = before = torch.ones_like(parameter)
    with pytest.raises(IndexError):
        placed.step(tokens + 17, target=tokens, loss_fn=_loss, reduction="mean")
    assert parameter.grad is before and not calls
    _step(placed, tokens)
    assert len(calls) == 1
    handle.remove()
    _step(placed, tokens)
    assert len(calls) == 1
