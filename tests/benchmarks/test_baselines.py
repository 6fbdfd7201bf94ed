"""The rival placements that the benchmarks compare with."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from unet3d import unet3d

from benchmarks.baselines import (
    RIVALS,
    balance_by_size,
    block_partition,
    equal_layer_counts,
    equal_parameters,
    hand_split,
    layer_chain,
    one_order,
    plan_placement,
)
from placer.cost import CostTable, estimate_costs
from placer.machine.devices import device_kind
from placer.partition import DeviceSlot, PlanningOptions
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


def test_sizes_move_the_boundary_towards_the_end_that_weighs_more() -> None:
    with torch.device("meta"):
        widths = [4] * 9 + [64] * 4
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
        program, costs, _ = subject(model, torch.empty(2, 4))
    assert sum(device == 0 for device in equal_layer_counts(program, costs, 2).values()) == 6
    assert sum(device == 0 for device in balance_by_size(program, costs, 2).values()) == 10


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_blocks_differ_by_at_most_the_largest_size(k: int) -> None:
    sizes = [0.0, 7, 1, 1, 4, 10, 2, 2, 9, 3, 0, 5]  # 0 … 10: mapping to [0, 1] only scales
    lengths = block_partition(sizes, k)
    ends = [sum(lengths[: i + 1]) for i in range(k)]
    sums = [sum(sizes[e - n : e]) for e, n in zip(ends, lengths, strict=True)]
    assert sum(lengths) == len(sizes)
    assert max(sums) - min(sums) <= max(sizes)


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


def test_a_split_by_hand_takes_along_what_runs_between_its_layers(unet: Subject) -> None:
    program, _, _ = unet
    layers = {"encoder": 0, "bottleneck": 0, "upsample": 1, "decoder": 1, "head": 1}
    placement = hand_split(program, layers)
    assert placement["encoder_0_0"] == placement["pool"] == 0  # pool is named by no pattern
    assert placement["head"] == placement["cat"] == placement["cat_1"] == 1
    with pytest.raises(ValueError, match="nothing"):
        hand_split(program, {**layers, "nothing": 1})


def test_one_order_takes_any_seed(unet: Subject) -> None:
    program, costs, _ = unet
    slots = [
        DeviceSlot(name=f"cuda:{i}", kind=device_kind(f"cuda:{i}", None), budget=None, reserve=0)
        for i in range(2)
    ]
    placement = one_order(program, costs, slots, PlanningOptions(objective="memory"), seed=7)
    assert set(placement) == set(program.order)
