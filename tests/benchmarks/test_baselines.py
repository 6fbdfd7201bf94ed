"""The rival placements that the benchmarks compare with."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from unet3d import unet3d

from benchmarks.baselines import (
    RIVALS,
    balance_by_size,
    equal_layer_counts,
    equal_parameters,
    layer_chain,
    plan_placement,
)
from placer.cost import CostTable, estimate_costs
from placer.program import Program, lower
from placer.simulation import simulate_plan
from placer.spec import PlacementSpec

Subject = tuple[Program, CostTable, torch.Tensor]


def subject(model: nn.Module, x: torch.Tensor) -> Subject:
    program = lower(model, (x,))
    return program, estimate_costs(program, [x], kernels="cuda"), x


@pytest.fixture(scope="module")
def unet() -> Subject:
    with torch.device("meta"):
        return subject(unet3d(width=4, depth=3), torch.empty(1, 1, 16, 16, 16))


@pytest.fixture(scope="module")
def wide_end() -> Subject:
    """Four layers, most activations in the first and most parameters in the last."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 400))
        return subject(model, torch.empty(2, 50, 4))


def test_layers_are_counted_and_parameters_weighed(wide_end: Subject) -> None:
    program, costs, _ = wide_end
    assert [len(names) for names in layer_chain(program)] == [1, 1, 1, 1]
    assert list(equal_layer_counts(program, costs, 2).values()) == [0, 0, 1, 1]
    assert list(equal_parameters(program, costs, 2).values()) == [0, 0, 0, 1]
    # Blocks may differ by the largest size, which is the last layer's: torchgpipe stops at once.
    assert list(balance_by_size(program, costs, 2).values()) == [0, 0, 1, 1]


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_makes_a_plan_that_runs_as_it_says(unet: Subject, name: str) -> None:
    program, costs, x = unet
    spec = PlacementSpec.model_validate({"devices": ["cuda:0", "cuda:1", "cuda:2"]})
    placement = RIVALS[name](program, costs, 3)
    assert set(placement) == set(program.order)
    plan = plan_placement(program, spec, [x], placement)
    device_of = {node: stage.devices[0] for stage in plan.stages for node in stage.nodes}
    moved = {n for n, device in placement.items() if device_of[n] != f"cuda:{device}"}
    together = {node for group in program.colocated for node in group}
    assert moved <= together
    assert {d.device for d in plan.devices} == set(device_of.values())
    for device in simulate_plan(program, plan, [x]).devices:
        assert device.peak <= device.predicted * 1.01
