"""Temporary memory of the optimizer's step: square roots of all parameters on a GPU, else of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placements import estimated_plan
from torch import nn

import placer


class Wide(nn.Sequential):
    """Large weights and few activations, so that the optimizer's step is the peak."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__(*(nn.Linear(256, 256, bias=bias) for _ in range(6)))


def peaks(devices: list[str], model: nn.Module, **fields: Any) -> list[tuple[int, int]]:
    spec = {"devices": devices, "optimizer": "adam", "objective": "memory", **fields}
    x = torch.randn(2, 256)
    plan = estimated_plan(model, spec, (x,))
    report = placer.simulate(model, plan, (x,))
    assert all(device.phase == "optimizer" for device in report.devices)
    return [(device.predicted, device.peak) for device in report.devices]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"], ["cpu:0", "cpu:1"]])
def test_the_step_of_adam_is_predicted(devices: list[str], bias: bool) -> None:
    for predicted, simulated in peaks(devices, Wide(bias=bias)):
        assert simulated == pytest.approx(predicted, rel=2e-3)


def test_gpus_update_all_parameters_at_once() -> None:
    """Parameters, gradients and two states; on CUDA also a copy of all, otherwise three of one layer."""
    model = Wide(bias=False)
    nbytes = sum(p.nbytes for p in model.parameters())
    ((_, gpu),), ((_, cpu),) = peaks(["cuda:0"], model), peaks(["cpu:0"], model)
    assert gpu == pytest.approx(5 * nbytes, rel=1e-3)
    assert cpu == pytest.approx(4.5 * nbytes, rel=1e-3)


def test_one_parameter_on_a_cpu_makes_torch_update_them_one_by_one() -> None:
    model = Wide(bias=False)
    layers = {"*": "cuda:0", "5": "cpu:0"}
    (gpu, on_gpu), (cpu, on_cpu) = peaks(["cuda:0", "cpu:0"], model, layers=layers)
    nbytes = model[0].weight.nbytes
    assert gpu == pytest.approx(on_gpu, rel=2e-3)
    assert cpu == pytest.approx(on_cpu, rel=2e-3)
    assert on_gpu == pytest.approx((4 * 5 + 3) * nbytes, rel=1e-3)
