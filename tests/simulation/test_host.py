"""Host memory of offloaded activations: counted, rounded like torch's pinned memory, and limited."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from oracle import assert_same
from placements import estimated_plan
from torch import Tensor, nn
from unet3d import unet3d

import placer
from placer.errors import BudgetError
from placer.plan.check import check_pinned
from placer.plan.store import plan_from_json, plan_to_json
from placer.timeline import PINNED, Block, HostUsage, Recorder, host_usage

pytestmark = pytest.mark.usefixtures("one_capture")


ROWS, WIDTH = 1000, 96
SAVED = 500 * WIDTH * 4  # bytes that a layer saves of a micro-batch
PINNED_SAVED = 2**18  # the power of two above


def network() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), torch.empty(ROWS, WIDTH)


def spec(kind: str, **fields: Any) -> dict[str, Any]:
    """Two devices, two micro-batches: two are in flight at the first stage, one at the second."""
    given = {"microbatches": 2, "schedule": "1F1B", "offload": ["*"], **fields}
    given["objective"] = "bottleneck"  # as many layers on both
    return {"devices": [f"{kind}:0", f"{kind}:1"], **given}


def copy(nbytes: int, kind: str = PINNED) -> Block:
    return Block(device="host", nbytes=nbytes, kind=kind, name="", layer="", shape=(nbytes,))


def test_pinned_blocks_are_powers_of_two_that_are_used_again() -> None:
    recorder = Recorder()
    first, second = recorder.allocate(copy(5)), recorder.allocate(copy(7))
    recorder.free(first)
    recorder.allocate(copy(6))  # in the block of 8 that the first had
    recorder.free(second)
    recorder.allocate(copy(3))  # in a block of 4: free ones of 8 are not cut
    recorder.allocate(copy(0))
    assert host_usage(recorder.timeline(), "host") == HostUsage(peak=13, reserved=8 + 8 + 4)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(("kind", "each"), [("cuda", PINNED_SAVED), ("cpu", SAVED)])
def test_a_plan_says_what_waits_on_the_host(kind: str, each: int, *, processes: bool) -> None:
    model, x = network()
    plan = placer.make_plan(model, spec(kind), x, processes=processes)
    count = 2 * 4 + 4  # what both stages save of their micro-batches in flight
    assert plan.host is not None
    assert (plan.host.peak, plan.host.reserved) == (count * SAVED, count * each)
    assert estimated_plan(model, spec(kind), x).host == plan.host
    report = placer.simulate(model, plan, x, processes=processes)
    assert report.host == plan.host
    assert report.to_json()["host"]["reserved"] == count * each
    assert plan_from_json(plan_to_json(plan)) == plan


def test_without_offloading_nothing_is_said_of_the_host() -> None:
    model, x = network()
    plan = placer.make_plan(model, spec("cuda", offload=[]), x)
    assert plan.host is None
    assert plan_to_json(plan)["host"] is None
    assert "host" not in placer.simulate(model, plan, x).to_json()


@cache
def unet(rows: int, size: int) -> tuple[nn.Module, Tensor]:
    """The link to the host is as fast as memory, so offloading takes less time than recomputing."""
    torch.manual_seed(0)
    return unet3d(width=4, depth=2).double(), torch.randn(rows, 1, *[size] * 3, dtype=torch.float64)


BOTH = {"checkpoint": "auto", "offload": "auto", "optimizer": "sgd", "reserve": 0}


def within(model: nn.Module, x: Tensor, share: float, *, stages: int, **fields: Any) -> Any:
    """The spec with this share of the memory that ``model`` needs if all activations are kept."""
    names = [f"cpu:{i}" for i in range(stages)]
    fields = {**BOTH, **fields}
    plain = {**fields, "checkpoint": [], "offload": [], "objective": "memory", "host_memory": None}
    most = max(
        device.peak for device in placer.make_plan(model, {"devices": names, **plain}, x).devices
    )
    return {"devices": [{"name": n, "memory": int(share * most)} for n in names], **fields}


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("stages", "share", "fields"),
    [
        (1, 0.55, {}),
        (1, 0.5, {"objective": "memory"}),
        (2, 0.6, {"microbatches": 2, "schedule": "1F1B"}),
    ],
)
def test_what_is_offloaded_fits_the_host_too(
    stages: int, share: float, fields: dict[str, Any]
) -> None:
    """It also computes what the model computes. Activations without room on the host are recomputed."""
    model, x = unet(2, 8)
    free = within(model, x, share, stages=stages, **fields)
    unlimited = placer.make_plan(model, free, x)
    assert unlimited.fits and unlimited.host is not None
    limit = int(0.5 * unlimited.host.needed)
    plan = placer.make_plan(model, {**free, "host_memory": limit}, x)
    assert plan.fits and plan.checkpoint
    assert plan.host is None or plan.host.needed <= limit
    report = placer.simulate(model, plan, x)
    assert report.host == plan.host
    for device, found in zip(plan.devices, report.devices, strict=True):
        assert device.budget is not None and found.peak <= device.budget
    assert plan.step_seconds >= 0.999 * unlimited.step_seconds
    assert_same(model, plan, (x,))


def test_ranks_share_the_host() -> None:
    """Replicas in one process run one after the other; those in their own processes run concurrently."""
    model, x = network()
    spec = within(model, x, 0.35, stages=1, checkpoint=[])
    spec = {**spec, "replicas": 2}
    needed = {}
    for processes in (False, True):
        plan = placer.make_plan(model, spec, x, processes=processes)
        assert plan.fits and plan.host is not None
        needed[processes] = plan.host.needed
        again = {**spec, "checkpoint": "auto", "host_memory": int(0.7 * plan.host.needed)}
        assert placer.make_plan(model, again, x, processes=processes).fits
    assert needed[True] > 1.5 * needed[False]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_host_with_too_little_memory_is_no_fit(kind: str) -> None:
    model, x = network()
    reserved = 12 * (PINNED_SAVED if kind == "cuda" else SAVED)
    enough = placer.make_plan(model, spec(kind, host_memory=reserved), x)
    assert enough.fits
    short = placer.make_plan(model, spec(kind, host_memory=reserved - 1), x)
    assert not short.fits
    assert short.overflow_bytes == 1
    assert all(device.fits for device in short.devices)
    for wanted in (short, spec(kind, host_memory=reserved - 1)):
        with pytest.raises(BudgetError, match=r"offloaded activations take .* of the host") as told:
            placer.compile(model, wanted, x, run_on="cpu")
        assert (told.value.where, told.value.missing_bytes) == ("/host_memory", 1)
        assert "host_memory" in told.value.remedy


def test_activations_that_this_machine_cannot_hold_are_refused() -> None:
    """Also without a limit: torch would fail to pin the memory in the middle of a step."""
    model, x = network()
    plan = placer.make_plan(model, spec("cuda", offload=["**"]), x)
    assert plan.host is not None and plan.host.budget is None
    check_pinned(plan, plan.host.needed)
    with pytest.raises(BudgetError, match="and this machine has"):
        check_pinned(plan, plan.host.needed - 1)


class Scaled(nn.Module):
    """Has a parameter without dimensions, as a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.exp()


def test_the_state_of_a_scalar_is_on_its_device() -> None:
    device = {"name": "cuda:0", "memory": "8GiB", "kind": "t4"}
    assert placer.make_plan(Scaled(), {"devices": [device]}, torch.randn(16, 8)).host is None
