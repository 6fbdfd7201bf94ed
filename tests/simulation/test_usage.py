"""The memory that a device needs for a timeline, by the model of the allocator under its budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.plan.summary import describe_step
from placer.plan.types import DevicePeak
from placer.report import verdict
from placer.simulation.usage import DeviceTimeline, bytes_without_starvation, measure
from placer.timeline import Block, Recorder

MIB = 2**20
NAME = "cuda:0"


def block(nbytes: int, kind: str = "forward", *, elastic: bool = False) -> Block:
    return Block(
        device=NAME, nbytes=nbytes, kind=kind, name="", layer="", shape=(nbytes,), elastic=elastic
    )


def run(*, workspace: int = 200 * MIB, elastic: bool = True) -> DeviceTimeline:
    """Three steps: 100 MiB that stay allocated, and one after the other 60 MiB with a workspace."""
    recorder = Recorder()
    recorder.allocate(block(100 * MIB, "parameter"))
    for _ in range(3):
        number = recorder.allocate(block(60 * MIB))
        recorder.free(recorder.allocate(block(workspace, "workspace", elastic=elastic)))
        recorder.free(number)
    return DeviceTimeline(recorder.timeline(), NAME)


def device(budget: int | None, **fields: Any) -> DevicePeak:
    given = {"allocator": "expandable", "reserve": 10 * MIB, "context": 20 * MIB, **fields}
    return DevicePeak(device=NAME, peak=0, budget=budget, **given)


def test_without_a_budget_every_kernel_has_what_it_wants() -> None:
    found = measure(device(None), run())
    assert (found.peak, found.workspaces, found.starved) == (160 * MIB, 200 * MIB, 0)
    assert found.reserved == 360 * MIB
    assert found.needed == 380 * MIB
    assert found.fits


def test_a_budget_without_room_for_a_workspace_fits_with_starved_kernels() -> None:
    found = measure(device(300 * MIB), run())
    assert found.fits
    assert found.reserved == 160 * MIB
    assert found.starved == 1  # per step
    assert bytes_without_starvation(found, run()) == pytest.approx(380 * MIB, rel=0.02)


def test_a_workspace_that_is_needed_counts() -> None:
    found = measure(device(300 * MIB), run(elastic=False))
    assert not found.fits
    assert found.reserved == pytest.approx(360 * MIB, rel=0.005)
    assert found.headroom == 300 * MIB - 30 * MIB - (found.reserved or 0)


def test_the_least_memory_is_said_where_it_does_not_fit() -> None:
    found = measure(device(150 * MIB), run())
    assert not found.fits
    assert found.reserved == pytest.approx(160 * MIB, rel=0.01)
    enough = device(found.needed + found.reserve)
    assert measure(enough, run()).fits


def test_a_device_without_the_allocator_needs_its_tensors() -> None:
    found = measure(device(300 * MIB, allocator=None, context=0), run())
    assert (found.peak, found.reserved, found.needed) == (160 * MIB, None, 160 * MIB)


def _volumes() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        parts = [nn.Sequential(nn.Conv3d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*parts, nn.Conv3d(32, 3, 1)), torch.empty(1, 32, 96, 96, 96)


def _plan(memory: str, allocator: str = "expandable", **fields: Any) -> placer.Plan:
    model, x = _volumes()
    gpu = {"name": NAME, "memory": memory, "allocator": allocator, "kind": "a100"}
    return placer.make_plan(model, {"devices": [gpu], **fields}, (x,))


def test_a_plan_says_what_its_process_takes_of_a_gpu() -> None:
    (found,) = _plan("16GiB").devices
    assert found.context == 520 * MIB
    assert found.reserve == int(0.02 * 16 * 2**30)
    assert found.workspaces > 0
    assert found.reserved is not None
    assert found.peak < found.reserved < found.peak + found.workspaces + 40 * MIB
    (default,) = _plan("16GiB", "default").devices
    assert default.reserved is not None and default.reserved >= found.reserved
    assert default.peak == found.peak


@pytest.mark.parametrize("rows", [100_000, 500_000])
def test_what_a_device_needs_where_a_plan_does_not_fit_is_enough(rows: int) -> None:
    """The allocator takes less than it asks the driver for (many rows), or more (few rows)."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Embedding(rows, 128), nn.Linear(128, 128)), torch.zeros(64, 5)

    def needs(memory: int) -> DevicePeak:
        gpu = {"name": NAME, "memory": memory, "allocator": "expandable"}
        (found,) = placer.make_plan(model, {"devices": [gpu], "reserve": 0}, x.long()).devices
        return found

    misfit = needs(700 * MIB)
    assert not misfit.fits and needs(misfit.needed).fits


def test_a_plan_near_the_edge_prefers_to_leave_kernels_their_workspaces() -> None:
    """It would fit without recomputing, but without room for workspaces."""
    (found,) = _plan("16GiB").devices
    tight = f"{(found.needed - 20 * MIB) // MIB}MiB"
    starved = _plan(tight, reserve=0)
    assert starved.fits and starved.devices[0].starved
    first, second = verdict(starved)
    assert first.startswith("fits, but expect slow steps: cuda:0 has")
    assert "of a step on cuda:0 find no room for the workspace that they want" in second
    assert describe_step(starved).startswith("at least ")
    lighter = _plan(tight, reserve=0, checkpoint="auto")
    assert lighter.fits and not lighter.devices[0].starved
    assert lighter.checkpoint and len(verdict(lighter)) == 1
    assert not describe_step(lighter).startswith("at least ")
