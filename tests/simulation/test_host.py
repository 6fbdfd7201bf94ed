"""What offloaded activations take of the host's memory: counted, rounded as torch does, and limited."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.errors import BudgetError
from placer.plan.store import plan_from_json, plan_to_json
from placer.timeline import PINNED, Block, HostUsage, Recorder, host_usage

ROWS, WIDTH = 1000, 96
SAVED = 500 * WIDTH * 4  # bytes that a layer saves of a micro-batch
PINNED_SAVED = 2**18  # the power of two above


def network() -> tuple[nn.Module, Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), torch.empty(ROWS, WIDTH)


def spec(kind: str, **fields: Any) -> dict[str, Any]:
    """Two devices, two micro-batches; the first stage has both of them in flight, the second one."""
    given = {"microbatches": 2, "schedule": "1F1B", "offload": ["*"], **fields}
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


def test_what_is_not_pinned_takes_its_bytes() -> None:
    recorder = Recorder()
    recorder.free(recorder.allocate(copy(5, "received")))
    recorder.allocate(copy(3, "received"))
    recorder.allocate(copy(100, "optimizer"))  # Adam's counts of steps
    assert host_usage(recorder.timeline(), "host") == HostUsage(peak=5, reserved=5)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(("kind", "each"), [("cuda", PINNED_SAVED), ("cpu", SAVED)])
def test_a_plan_says_what_waits_on_the_host(kind: str, each: int, *, processes: bool) -> None:
    model, x = network()
    plan = placer.make_plan(model, spec(kind), x, processes=processes)
    count = 2 * 4 + 4  # what both stages save of their micro-batches in flight
    assert plan.host is not None
    assert (plan.host.peak, plan.host.reserved) == (count * SAVED, count * each)
    report = placer.simulate(model, plan, x, processes=processes)
    assert report.host == plan.host
    assert report.to_json()["host"]["reserved"] == count * each
    assert plan_from_json(plan_to_json(plan)) == plan


def test_what_waits_on_the_host_is_not_on_a_rank() -> None:
    model, x = network()
    kept, away = (
        placer.make_plan(model, spec("cpu", offload=layers), x, processes=True).devices[0].peak
        for layers in ((), ["*"])
    )
    assert away < 0.8 * kept


def test_without_offloading_nothing_is_said_of_the_host() -> None:
    model, x = network()
    plan = placer.make_plan(model, spec("cuda", offload=[]), x)
    assert plan.host is None
    assert "host" not in plan_to_json(plan)
    assert "host" not in placer.simulate(model, plan, x).to_json()


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
