"""Every tensor is on the device that reads it, on devices that are not one.

A CPU machine has a single device, which accepts whatever it is given. So these steps run on fake tensors,
which may be on ``cpu:1`` and ``cpu:2``: an operation on tensors of two devices raises, and what the
caller passes is on ``cpu``, which is a third. Values are compared elsewhere (`test_equality`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import placer
from placer.executor.module import runtime_of
from placer.executor.place_model import place_model
from placer.executor.places.place import Place
from placer.executor.stages.offload import offload_saved
from placer.program import lower

CALLER = torch.device("cpu")


class Mixed(nn.Module):
    """Constants, buffers, tensors that ``forward`` makes, a skip, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
        self.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.norms[0](self.first(x) + self.shift).relu()
        hidden = self.second(skipped) + torch.arange(4, device=x.device)
        joined = torch.cat([self.norms[1](hidden), skipped], 1).relu()
        return self.last(joined.view(-1, 2, 4).sum(1) + self.shift + torch.zeros_like(skipped)) + x


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mixed": (Mixed, torch.randn(8, 4)),
    "transformer": (models.TiedTransformer, torch.randint(0, 17, (8, 6))),
}
HOW: dict[str, dict[str, Any]] = {
    "two stages": {},
    "1F1B": {"microbatches": 4, "schedule": "1F1B"},
    "zero bubble": {"microbatches": 4, "schedule": "InterleavedZeroBubble"},
    "replicas": {"replicas": 2, "microbatches": 2},
    "recomputed": {"checkpoint": ["**"]},
    "offloaded": {"offload": ["**"]},
    "offloaded beside the kernels": {"offload": ["**"], "offload_overlap": True},
    "deferred": {"batch_norm": "deferred", "microbatches": 2, "replicas": 2},
    "bf16": {"precision": "bf16"},
}

# The transformer's input requires no gradient, and its dropout is not repeated.
CASES = [*(("mixed", how) for how in HOW), ("transformer", "recomputed")]


def _place(model: nn.Module, x: Tensor, spec: dict[str, Any]) -> placer.PlacedModule:
    """A placed module with places on real devices, and tensors that are still on the only one."""
    both = {"devices": ["cpu:1", "cpu:2"], "objective": "memory"}  # by time it may be one
    spec = {**both, **spec}
    plan = placer.make_plan(model, spec, x)
    places = [
        [
            [Place(name, torch.device(name)) for name in plan.devices_of(stage, replica)]
            for stage in plan.stages
        ]
        for replica in range(plan.replicas)
    ]
    return place_model(model, lower(model, (x,)), plan, places)


def _move(placed: placer.PlacedModule) -> dict[str, torch.device]:
    """Replace the tensors of ``placed`` by fake ones on their devices, which are returned by name."""
    made: dict[int, Tensor] = {}
    homes = {}
    for name, stage in runtime_of(placed).staged.state_stage.items():
        path, _, leaf = name.rpartition(".")
        module = placed.get_submodule(path)
        table: dict[str, Any] = (
            module._parameters if leaf in module._parameters else module._buffers
        )
        old, homes[name] = table[leaf], runtime_of(placed).replicas[0].places[stage].device
        if id(old) not in made:
            new = torch.empty(old.shape, dtype=old.dtype, device=homes[name])
            made[id(old)] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
        table[leaf] = made[id(old)]
    return homes


def _loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    rows, whole = target
    return (output.flatten(1).mean(1) * rows * whole.sum()).mean()


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_no_operation_reads_from_two_devices(name: str, how: str) -> None:
    build, shaped = MODELS[name]
    placed = _place(build(), shaped, HOW[how])
    with FakeTensorMode(allow_non_fake_inputs=True):
        homes = _move(placed)
        assert set(homes.values()) == {torch.device("cpu:1"), torch.device("cpu:2")}
        x = torch.zeros(shaped.shape, dtype=shaped.dtype)
        if x.is_floating_point():
            x.requires_grad_()
        target = (torch.zeros(8), placer.Whole(torch.zeros(3)))
        loss = placed.step(x, target=target, loss_fn=_loss, reduction="mean")
        assert loss.device == placed.output_device != CALLER
        _check_devices(placed, homes, x)
        placed.zero_grad()
        output = placed(x)
        assert output.device == placed.output_device
        output.mean().backward()
        _check_devices(placed, homes, x)
        with torch.no_grad():
            assert placed.eval()(x).device == placed.output_device


def _check_devices(placed: placer.PlacedModule, homes: dict[str, torch.device], x: Tensor) -> None:
    for name, parameter in placed.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.device == parameter.grad.device == homes[name], name
    for name, buffer in placed.named_buffers():
        assert buffer.device == homes[name], name
    assert not x.requires_grad or (x.grad is not None and x.grad.device == CALLER)


def test_what_a_layer_saves_on_a_device_of_its_own_is_not_offloaded() -> None:
    """It would come back on the device of the stage."""
    with FakeTensorMode():
        x = torch.ones(4, device="cpu:2", requires_grad=True)
        with offload_saved([], [Place("first", torch.device("cpu:1"))]):
            y = x.sin()
        y.sum().backward()
        assert x.grad is not None and x.grad.device == x.device
