"""Compares the tables of bytes with their definitions, cell by cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from unet3d import unet3d

import placer
from placer.cost import estimate_costs
from placer.partition import DeviceSlot, choose_partition, rate_partition
from placer.partition.stage_cost.pending_gradients import IntervalCorrection, largest_up_to
from placer.planner.devices import device_slot
from placer.planner.resolve import planning_options
from placer.program import lower

WIDTH = 9


def _by_definition(
    table: NDArray[np.float64],
    starts: list[int],
    ends: list[int],
    changes: list[IntervalCorrection],
) -> NDArray[np.float64]:
    found = np.full((len(starts), len(ends)), -np.inf)
    for row, start in enumerate(starts):
        for index, end in enumerate(ends):
            for column in range(start, end):
                value = table[row, column] + sum(
                    change.nbytes
                    for change in changes
                    if change.first <= start <= change.last
                    and change.begin <= column < change.until
                    and end <= change.sender
                )
                found[row, index] = max(found[row, index], value)
    return found


positions = st.integers(0, WIDTH)
corrections = st.builds(
    IntervalCorrection,
    first=positions,
    last=positions,
    begin=positions,
    until=positions,
    sender=positions,
    nbytes=st.integers(-50, 50).map(float),
)


@given(
    st.lists(st.integers(0, 99), min_size=WIDTH * WIDTH, max_size=WIDTH * WIDTH),
    st.sets(st.integers(1, WIDTH - 1)),
    st.lists(corrections, max_size=6),
)
def test_the_largest_value_of_every_stage(
    values: list[int], boundaries: set[int], changes: list[IntervalCorrection]
) -> None:
    starts = [0, *sorted(boundaries)]
    ends = [*sorted(boundaries), WIDTH]
    table = np.array(values, dtype=float).reshape(WIDTH, WIDTH)[: len(starts)]
    found = largest_up_to(table, starts, ends, changes)
    np.testing.assert_array_equal(found, _by_definition(table, starts, ends, changes))


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
