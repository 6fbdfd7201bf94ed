"""Copies that a stage receives, and gradients that are sent back, are predicted exactly."""

from __future__ import annotations

import torch
from placements import pinned_plan
from torch import nn

import placer

_SCALARS = 64  # bytes: numbers that autograd makes on the way


def assert_predicted(model: nn.Module, device_of: dict[str, int]) -> None:
    """With its nodes on these devices, every device has the peak that the plan predicts."""
    x = torch.randn(512, 64, dtype=torch.float64)
    devices = [f"cpu:{i}" for i in range(1 + max(device_of.values()))]
    plan = pinned_plan(model.double(), x, devices, lambda _, node: devices[device_of[node]])
    assert set(device_of) == set(plan.node_layers)
    for device in placer.simulate(model, plan, (x,)).devices:
        assert device.peak <= device.predicted + _SCALARS, device
        assert device.predicted <= 1.34 * device.peak, device  # where two copies could be one


class Returned(nn.Module):
    """A layer's result is returned twice and read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.first(x)
        return self.head(y.tanh()).sin(), y, y


def test_gradients_of_two_stages_come_home_beside_each_other() -> None:
    """The gradients of the loss are already summed when the gradient of the other reader arrives."""
    assert_predicted(Returned(), {"first": 0, "tanh": 1, "head": 1, "sin": 2})


class Lent(nn.Module):
    """A view of the input is multiplied by a value computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        view = x[:, : x.size(1)]
        return self.head(y.tanh() * view)


def test_a_copy_stays_while_a_later_stage_has_yet_to_read_a_view_of_it() -> None:
    device_of = {"sin": 0, "size": 1, "getitem": 1, "tanh": 1, "mul": 2, "head": 2}
    assert_predicted(Lent(), device_of)


class Joined(nn.Module):
    """Half of a value, which is also returned, is concatenated with another half."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        half = y[:, :32] * 0.5
        torch.cat([x[:, :32] * 0.5, half], 1)
        return self.head(x.sin()), y


def test_a_stage_cannot_drop_what_it_never_received() -> None:
    """It has a view of the value, from the stage that made the view, but not the value itself."""
    joined = {"mul": 2, "getitem_1": 2, "mul_1": 2, "cat": 2}
    assert_predicted(Joined(), {"add": 0, "getitem": 1, **joined, "sin": 3, "head": 3})
