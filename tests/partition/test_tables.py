"""Compares the tables of bytes with their definitions, cell by cell."""

from __future__ import annotations

import pytest
import torch
from unet3d import unet3d

import placer
from placer.cost import estimate_costs
from placer.partition import DeviceSlot, choose_partition, rate_partition
from placer.planner.devices import device_slot
from placer.planner.resolve import planning_options
from placer.program import lower


@pytest.mark.matrix(1)
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_stages_cost_what_they_did_when_they_were_chosen(
    microbatches: int, processes: bool
) -> None:
    with torch.device("meta"):
        model, x = unet3d(width=4, depth=3), torch.empty(4, 1, 16, 16, 16)
    spec = placer.load_spec(
        {"devices": ["cuda:0", "cuda:1", "cuda:2"], "objective": "memory", "schedule": "1F1B"}
    )
    program = lower(model, (x,))
    rows = x[: 4 // microbatches]
    costs = estimate_costs(program, [rows], kernels="cuda")
    options = planning_options(spec, [len(rows)] * microbatches, processes=processes)
    slots: list[DeviceSlot] = [device_slot(device, spec) for device in spec.devices]
    chosen = choose_partition(program, costs, slots, {}, options)
    rated = rate_partition(program, costs, chosen.placed, options)
    assert rated.stages == chosen.stages
    assert rated.peaks == chosen.peaks
    assert (rated.fits, rated.seconds) == (chosen.fits, chosen.seconds)
