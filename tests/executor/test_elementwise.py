"""Which optimizers may update pieces of parameters: those for which pieces give what the whole gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import placer
from placer.executor.distributed.reduction.elementwise import require_elementwise

ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop"]
ELEMENTWISE += ["Rprop", "ASGD"]


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_these_do(kind: str) -> None:
    parameters = _parameters()
    optimizer = getattr(torch.optim, kind)([{"params": [p]} for p in parameters])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    before = torch.get_rng_state()
    require_elementwise(optimizer, parameters[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in parameters)
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0, 0]


def test_while_a_scaler_skips_a_step() -> None:
    optimizer = torch.optim.Adam(_parameters(), fused=True)
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    optimizer.grad_scale = torch.ones(1)  # type: ignore[attr-defined]
    require_elementwise(optimizer, torch.ones(1))


class Mixed(torch.optim.SGD):
    """Clips by the norm of a gradient where a group says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.grad.norm() if group["clipped"] else 1.0
                    p.sub_(p.grad / scale, alpha=group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adafactor,
        torch.optim.LBFGS,
        lambda parameters: torch.optim.Muon(parameters),
        lambda p: Mixed([{"params": p[:1], "clipped": False}, {"params": p[1:], "clipped": True}]),
    ],
    ids=["Adafactor", "LBFGS", "Muon", "one of two groups"],
)
def test_these_do_not(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    parameters = _parameters()
    with pytest.raises(placer.PlacerError, match="does not update each number by itself"):
        require_elementwise(make(parameters), parameters[0])
