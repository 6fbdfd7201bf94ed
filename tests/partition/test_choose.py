"""Placements of models: pins, groups, budgets, unequal devices, positions, hash seeds."""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placements import assert_valid_plan
from torch import Tensor, nn

import placer
from placer.machine.catalogue import CATALOGUE

pytestmark = pytest.mark.usefixtures("one_capture")


@pytest.fixture(autouse=True)
def _cpus_of_unequal_speed() -> Iterator[None]:
    fast, slow = (replace(CATALOGUE[name], device_type="cpu") for name in ("l40s", "p100"))
    with mock.patch.dict(CATALOGUE, {"l40s": fast, "p100": slow}):
        yield


class Branches(nn.Module):
    """Blocks in a row, each with a side path; a skip from the first to the last; one tied weight.

    Where ``written``, every block's result has a part of it changed in place behind its back.
    """

    def __init__(self, widths: tuple[int, ...], *, tied: bool, written: bool = False) -> None:
        super().__init__()
        self.written = written
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for width in widths
        )
        self.sides = nn.ModuleList(nn.Linear(8, 8) for _ in widths)
        self.last = nn.Linear(8, 8)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.first(x)
        for block, side in zip(self.blocks, self.sides, strict=True):
            y = block(x)
            part = y[:, :4]
            gate = torch.sigmoid(side(x))
            if self.written:
                part.mul_(2.0)  # stays with y, however cheap a cut between them is
            x = y + gate
        return self.last(x + skip)


@st.composite
def cases(draw: Any) -> tuple[nn.Module, dict[str, Any]]:
    widths = tuple(draw(st.lists(st.sampled_from([4, 16, 64]), min_size=1, max_size=4)))
    count = draw(st.integers(1, 4))
    devices = []
    for i in range(count):
        device: dict[str, Any] = {"name": f"cpu:{i}"}
        if draw(st.booleans()):
            device["memory"] = draw(st.sampled_from([6_000, 20_000, 100_000]))
        device["kind"] = draw(st.sampled_from(["l40s", "p100"]))
        devices.append(device)
    layers = {}
    for name in ("first", "blocks.0", "sides.0", "last"):
        if draw(st.integers(0, 3)) == 0:
            layers[name] = f"cpu:{draw(st.integers(0, count - 1))}"
    spec = {
        "devices": devices,
        "layers": layers,
        "objective": draw(st.sampled_from(["throughput", "memory", "latency"])),
        "schedule": draw(st.sampled_from(["GPipe", "1F1B"])),
        "microbatches": draw(st.sampled_from([1, 4])),
        "training": draw(st.booleans()),
        "reserve": draw(st.sampled_from([0, 500])),
    }
    return Branches(widths, tied=draw(st.booleans()), written=draw(st.booleans())), spec


@given(cases())
def test_every_plan_is_valid(case: tuple[nn.Module, dict[str, Any]]) -> None:
    model, spec = case
    assert_valid_plan(model, spec, (torch.randn(8, 8),))


def _chain(blocks: int = 12) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(blocks)))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_next_best_place_costs_what_a_plan_with_it_takes(microbatches: int) -> None:
    names = ["cuda:0", "cuda:1"]
    devices = [{"name": names[0], "kind": "rtx3060-12gb"}, {"name": names[1], "kind": "t4"}]
    spec = {"devices": devices, "microbatches": microbatches, "schedule": "1F1B"}
    model, x = _chain(), torch.empty(2**16, 64, device="meta")
    plan = placer.make_plan(model, spec, (x,))
    (boundary,) = plan.boundaries
    assert boundary.next_best is not None and boundary.next_value is not None
    assert plan.step_seconds is not None and boundary.next_value >= plan.step_seconds
    nodes = [node for stage in plan.stages for node in stage.nodes]
    first, last = (stage.devices[0] for stage in plan.stages)
    end = nodes.index(boundary.next_best) + 1
    layers = {plan.node_layers[n]: first if i < end else last for i, n in enumerate(nodes)}
    moved = placer.make_plan(model, {**spec, "layers": layers}, (x,))
    assert boundary.next_value == pytest.approx(moved.step_seconds)


def test_a_faster_device_gets_more() -> None:
    spec = {
        "devices": [{"name": "cuda:0", "kind": "t4"}, {"name": "cuda:1", "kind": "h100"}],
        "optimizer": "sgd",
    }
    plan = placer.make_plan(_chain(), spec, (torch.empty(2**22, 64, device="meta"),))
    sizes = {stage.devices[0]: len(stage.nodes) for stage in plan.stages}
    assert sizes["cuda:1"] > 2 * sizes["cuda:0"]


def test_a_larger_device_gets_more_bytes() -> None:
    model, x = _chain(), torch.randn(256, 64)
    (whole,) = placer.make_plan(model, {"devices": ["cpu"]}, (x,)).devices
    budgets = [int(whole.peak * share) for share in (0.35, 0.9)]
    devices = [{"name": f"cpu:{i}", "memory": b} for i, b in enumerate(budgets)]
    for objective in ("throughput", "memory"):
        plan = assert_valid_plan(model, {"devices": devices, "objective": objective}, (x,))
        assert plan.fits
        peaks = {device.device: device.peak for device in plan.devices}
        assert peaks["cpu:1"] > 1.5 * peaks["cpu:0"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_under_1f1b_earlier_stages_hold_less_per_micro_batch(objective: str) -> None:
    """Stage q of 4 has 4 - q micro-batches in flight, so if memory is scarce it gets a smaller share."""
    x = torch.randn(256, 64)
    spec: dict[str, Any] = {"microbatches": 8, "schedule": "1F1B", "optimizer": "sgd"}
    least = assert_valid_plan(
        _chain(16), spec | {"devices": [f"cpu:{i}" for i in range(4)], "objective": "memory"}, (x,)
    )
    budget = max(device.peak for device in least.devices)
    devices = [{"name": f"cpu:{i}", "memory": budget} for i in range(4)]
    plan = assert_valid_plan(_chain(16), spec | {"devices": devices, "objective": objective}, (x,))
    assert plan.fits
    sizes = [len(stage.nodes) for stage in plan.stages]
    assert sizes[0] < sizes[-1]
    assert sizes == sorted(sizes)


class LongSkip(nn.Module):
    """Equal blocks in a row, and a wide value that skips all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.narrow = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(18))
        self.last = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)
        x = self.narrow(wide)
        for block in self.blocks:
            x = block(x)
        return x + self.last(wide)


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("objective", "width"), [("bottleneck", 1024), ("memory", 256)])
def test_a_value_that_skips_a_stage_costs_it_nothing(objective: str, width: int) -> None:
    """In one process it is copied to its reader; with a process per device it is sent there."""
    model, x = LongSkip(width), torch.randn(4096, 64)
    layers = {"first": "cuda:0", "last": "cuda:2"}
    spec = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "layers": layers, "objective": objective}
    for processes in (False, True):
        plan = assert_valid_plan(model, spec, (x,), processes=processes)
        # ``narrow`` is with ``first``: the middle stage is given its result, and gives another one.
        assert plan.stages[1].memory.boundary == 2 * 4096 * 64 * 4


def test_pins_in_turn_make_a_device_hold_two_stages() -> None:
    layers = {"first": "cpu:0", "blocks.*": "cpu:1", "sides.*": "cpu:1", "last": "cpu:0"}
    spec = {"devices": ["cpu:0", "cpu:1"], "layers": layers}
    plan = assert_valid_plan(Branches((16, 16), tied=False), spec, (torch.randn(8, 8),))
    assert [stage.devices[0] for stage in plan.stages] == ["cpu:0", "cpu:1", "cpu:0"]


class Nothing(nn.Module):
    """It has an unread parameter, and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_without_operations_is_one_stage(count: int) -> None:
    spec = {"devices": [f"cpu:{i}" for i in range(count)]}
    plan = assert_valid_plan(Nothing(), spec, (torch.randn(2, 2),))
    assert len(plan.stages) == 1
    placed = placer.compile(Nothing(), plan, (torch.ones(2, 2),), run_on="cpu")
    assert torch.equal(placed(torch.ones(2, 2)), torch.ones(2, 2))


_PLAN = """
import torch, models
from placer.plan.store import plan_text
from unet3d import unet3d
import placer
spec = {"devices": ["cpu:0", "cpu:1", "cpu:2"], "microbatches": 2, "objective": "memory"}
print(plan_text(placer.make_plan(models.TiedTransformer(), spec, (torch.arange(12).view(4, 3),))))
x = torch.empty(1, 1, 16, 16, 16)
print(plan_text(placer.make_plan(unet3d(width=4, depth=3), spec | {"microbatches": 1}, (x,))))
"""


@pytest.mark.matrix(0)
def test_the_hash_seed_does_not_change_a_plan() -> None:
    """Compares this process with one with another seed; Python draws it at the start if none is given."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", _PLAN], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(_PLAN, {})
    assert run.stdout == here.getvalue()


def test_explain_says_how_near_a_lower_bound_is() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    spec = {"devices": ["cpu:0", "cpu:1"]}
    plan = placer.make_plan(model, spec, torch.randn(4096, 64))
    assert 0 < plan.optimality.above < 0.25
    share = math.ceil(100 * plan.optimality.above)
    assert f"(at most {share} % above a lower bound)" in plan.explain()


def test_explain_says_that_one_stage_is_as_fast_as_it_can_be() -> None:
    plan = placer.make_plan(nn.Linear(64, 64), {"devices": ["cpu:0"]}, torch.randn(4096, 64))
    assert plan.optimality.above == 0 and "; no other stages take less\n" in plan.explain()


def test_explain_names_the_cut_and_the_next_best() -> None:
    plan = assert_valid_plan(
        models.ConvNet(),
        {"devices": ["cpu:0", "cpu:1"], "objective": "bottleneck"},
        (torch.randn(8, 1, 8, 8),),
    )
    text = plan.explain()
    assert plan.optimality.above > 0.25
    assert "lower bound" not in text and "cross per micro-batch" in text
    (boundary,) = plan.boundaries
    assert boundary.next_best is not None and boundary.next_value is not None
    assert f"after {boundary.next_best}" in text
    # The next-best cut, pinned, costs what is said.
    order = [node for stage in plan.stages for node in stage.nodes]
    assert boundary.next_value >= plan.optimality.value * (1 - 1e-9)
    assert order.index(boundary.next_best) != order.index(boundary.last)
