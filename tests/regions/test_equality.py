"""The law with regions recomputed in backward, offloaded to the host, or both."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from oracle import assert_same
from torch import Tensor, nn
from unet3d import unet3d

import placer

D = torch.float64


class Counting(nn.Module):
    """State that a forward writes and reads: run twice, it would give another result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=D))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.tanh(self.inner(x)) * self.calls.clone()


def _counting() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "noise that autograd saves before it is written": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU(), nn.Linear(4, 2)),
        lambda: torch.randn(6, 4, dtype=D),
        ["0", "1"],
    ),
    "dropout": (models.ConvNet, lambda: torch.randn(9, 1, 8, 8, dtype=D), ["conv*", "dropout"]),
    "tied transformer": (
        models.TiedTransformer,
        lambda: torch.randint(0, 17, (7, 6)),
        ["tokens", "blocks.*"],
    ),
    "in place": (
        models.InPlace,
        lambda: torch.randn(8, 2, 5, 5, dtype=D),
        ["first", "bn", "relu", "shared"],
    ),
    "up to a write in place": (
        models.InPlace,
        lambda: torch.randn(8, 2, 5, 5, dtype=D),
        ["first", "bn", "last"],
    ),
    "up to each write in place": (
        lambda: unet3d(width=2, depth=3, norm="batch"),
        lambda: torch.randn(5, 1, 8, 8, 8, dtype=D),
        ["**.0", "**.1", "**.3", "**.4"],
    ),
    "recurrent": (models.Recurrent, lambda: torch.randn(7, 4, 3, dtype=D), ["rnn", "out"]),
    "batch norm": (
        lambda: unet3d(width=2, depth=3, norm="batch"),
        lambda: torch.randn(5, 1, 8, 8, 8, dtype=D),
        ["encoder.*", "decoder.*"],
    ),
    "state that counts": (_counting, lambda: torch.randn(6, 4, dtype=D), ["1"]),
}


CUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2)]  # stages, replicas, micro-batches


def _plan(model: nn.Module, x: Tensor, **fields: Any) -> placer.Plan:
    stages = fields.pop("stages")
    return placer.make_plan(model, {"devices": [f"cpu:{i}" for i in range(stages)], **fields}, (x,))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("policy", ["checkpoint", "offload", "both"])
@pytest.mark.parametrize("name", CASES)
def test_results_equal_eager(name: str, policy: str) -> None:
    torch.manual_seed(0)
    build, inputs, patterns = CASES[name]
    model, x = build().double(), inputs()
    fields: dict[str, Any] = {
        f: patterns for f in ("checkpoint", "offload") if policy in (f, "both")
    }
    cut = list(CASES).index(name) + ["checkpoint", "offload", "both"].index(policy)
    stages, replicas, microbatches = CUTS[cut % len(CUTS)]
    if name == "state that counts":  # each slice counts
        fields["inputs"] = {"input": {"batch_dim": 0}}
    plan = _plan(model, x, stages=stages, replicas=replicas, microbatches=microbatches, **fields)
    regions = list(itertools.chain(*(stage.regions for stage in plan.stages)))
    assert regions
    assert all(r.recompute == ("checkpoint" in fields) for r in regions)
    assert all(r.offload == ("offload" in fields) for r in regions)
    assert_same(model, plan, (x,))


def test_batch_norm_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    model, x = models.InPlace(), torch.randn(8, 2, 5, 5)
    placed = placer.compile(model, {"devices": ["cpu"], "checkpoint": ["bn", "relu"]}, (x,))
    placed(x).sum().backward()
    assert placed.get_buffer("bn.num_batches_tracked").item() == 1
    model(x)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(placed.get_buffer(name), buffer)


def test_bf16_is_recomputed_under_autocast() -> None:
    torch.manual_seed(0)
    model, x = models.ConvNet(0.0), torch.randn(4, 1, 8, 8)
    spec = {"devices": ["cpu:0", "cpu:1"], "precision": "bf16"}
    grads = []
    for fields in ({}, {"checkpoint": ["conv*"]}, {"offload": ["conv*", "fc*"]}):
        placed = placer.compile(model, {**spec, **fields}, (x,))
        placed(x).float().square().mean().backward()
        grads.append([p.grad for p in placed.parameters()])
    for plain, recomputed, offloaded in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)
        torch.testing.assert_close(offloaded, plain, rtol=0, atol=0)


def test_without_gradients_nothing_is_recomputed_or_moved() -> None:
    model, x = models.ConvNet().eval(), torch.randn(4, 1, 8, 8)
    spec = {"devices": ["cpu"], "checkpoint": ["conv1"], "offload": ["conv2"]}
    placed = placer.compile(model, spec, (x,))
    with torch.no_grad():
        torch.testing.assert_close(placed(x), model(x))


def test_a_gradient_may_be_taken_twice() -> None:
    model, x = models.ConvNet(0.0).double(), torch.randn(4, 1, 8, 8, dtype=D)
    placed = placer.compile(model, {"devices": ["cpu"], "offload": ["conv*", "fc1"]}, (x,))
    loss = placed(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in placed.parameters()]
    loss.backward()
    for p, grad in zip(placed.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad)
