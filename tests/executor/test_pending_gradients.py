"""Pending gradients of skip connections stay where they were made until their value's backward runs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ledgers import live_bytes
from oracle import assert_close
from torch import Tensor, nn
from unet3d import unet3d

import placer
from placer.executor.places.place import Place
from placer.executor.places.transfer import PendingGradients
from placer.simulation.ledger import Ledger

TWO = {"devices": ["cpu:0", "cpu:1"]}


class Skip(nn.Module):
    """Three stages read the result of ``first``; one of them as a part of a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(8, 4)
        self.fourth = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(self.first(x))
        hidden = torch.tanh(self.second(kept)) + kept
        hidden = torch.tanh(self.third(torch.cat([hidden, kept], dim=1)))
        return self.fourth(hidden * kept)


SKIP_SPEC = {
    "devices": ["cpu:0", "cpu:1", "cpu:2"],
    "layers": {"first": "cpu:0", "second": "cpu:0", "third": "cpu:1", "fourth": "cpu:2"},
}


@pytest.fixture
def skip() -> tuple[Skip, Tensor]:
    torch.manual_seed(0)
    return Skip().double(), torch.randn(3, 4, dtype=torch.float64)


def test_gradients_of_gradients_take_the_same_way(skip: tuple[Skip, Tensor]) -> None:
    model, x = skip
    placed = placer.compile(copy.deepcopy(model), SKIP_SPEC, (x,), run_on="cpu")

    def penalty(call: nn.Module) -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(call(inputs).square().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
        return [p.grad for p in call.parameters() if p.grad is not None]

    found, expected = penalty(placed), penalty(model)
    assert len(found) == len(expected) == 8
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, "gradient of a gradient")


def test_a_graph_that_is_kept_can_be_run_twice(skip: tuple[Skip, Tensor]) -> None:
    model, x = skip
    placed = placer.compile(copy.deepcopy(model), SKIP_SPEC, (x,), run_on="cpu")
    for call in (placed, model):
        loss = call(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, a), b in zip(placed.named_parameters(), model.parameters(), strict=True):
        assert_close(a.grad, b.grad, name)


def _peaks(run: Callable[[], object]) -> dict[str, int]:
    ledger = Ledger()  # weights and inputs, which it did not see come, do not count
    with ledger:
        run()
    return {d: m.nbytes for d, m in ledger.timeline().peaks().items() if d.startswith("cpu:")}


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1
        y.register_hook(lambda grad: grad * 2)
        return y


def test_a_hook_that_forward_puts_on_a_value_gets_what_later_stages_add() -> None:
    model = nn.Sequential(Hooked(), nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    placed = placer.compile(copy.deepcopy(model), TWO | {"layers": {"0": "cpu:0", "1": "cpu:1"}}, x)
    model(x).square().mean().backward()
    for backward in (
        lambda: placed(x).square().mean().backward(),
        lambda: placed.step(x, loss_fn=lambda y: y.square().mean()),
    ):
        placed.zero_grad()
        backward()
        for a, b in zip(placed.parameters(), model.parameters(), strict=True):
            assert_close(a.grad, b.grad, "gradient through a hook")


def test_calling_the_module_holds_what_step_holds() -> None:
    model, x = unet3d(width=4, depth=2), torch.randn(1, 1, 16, 16, 16)
    decoder = {"encoder": "cpu:0", "bottleneck": "cpu:0", "decoder": "cpu:1", "head": "cpu:1"}
    placed = placer.compile(model, {**TWO, "layers": decoder}, (x,), run_on="cpu")
    stepped = _peaks(lambda: placed.step(x, loss_fn=lambda y: y.square().mean()))
    placed.zero_grad()
    called = _peaks(lambda: placed(x).square().mean().backward())
    assert called["cpu:0"] == pytest.approx(stepped["cpu:0"], rel=0.01)
    assert called["cpu:1"] == pytest.approx(stepped["cpu:1"], rel=0.01)


def test_a_part_of_a_larger_gradient_is_pending_by_itself() -> None:
    here, there = (Place(name, torch.device("cpu")) for name in ("cpu:0", "cpu:1"))
    value = torch.zeros(4, 2)
    pending = PendingGradients(here, value)
    whole = torch.arange(16.0).reshape(4, 4)
    ones = torch.ones(4, 2)
    ledger = Ledger()
    ledger.add(whole, there)
    ledger.add(ones, here)
    with ledger, torch.no_grad():
        pending.hold(there, whole[:, 2:])
        expected = whole[:, 2:].clone() + 1
        del whole
        live = live_bytes(ledger)
        found = pending.add_to(ones)
    assert live["cpu:1"] == 2 * 4 * 2 * 4  # the part, and ``expected``; not the whole
    assert found is not None and torch.equal(found, expected)
    assert not pending


def test_pending_gradients_on_the_home_device_are_not_overwritten() -> None:
    """Others may read it, so the sum is a new tensor, and the next gradient is added to that."""
    home = Place("cpu:0", torch.device("cpu"))
    own, *others = (torch.full((4, 3), float(i)) for i in range(3))
    pending = PendingGradients(home, own)
    for gradient in others:
        pending.hold(home, gradient)
    with torch.no_grad():
        found = pending.add_to(own)
    assert found is not None and (found == 3).all()
    assert [float(x[0, 0]) for x in (own, *others)] == [0, 1, 2]
