"""A verdict says for which runtime it is, and whether that of the other one differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured import captured_once
from unet3d import unet3d

from placer.program import lower
from placer.report import verdict
from placer.simulation.judge import JudgingPlanner
from placer.spec import load_spec


@pytest.fixture(scope="module")
def planner() -> Callable[[bool], JudgingPlanner]:
    """A planner for processes or not. Under the zero-bubble schedule, a rank keeps gradients for longer."""
    with torch.device("meta"):
        model, x = unet3d(width=8, depth=2), torch.empty(8, 1, 32, 32, 32)
    with captured_once():
        program = lower(model, (x,))
    return lambda processes: JudgingPlanner(program, [x], processes=processes)


STAGES = (("encoder", "pool"), ("bottleneck",), ("upsample",), ("decoder", "head"))
LAYERS = {layer: f"cuda:{i}" for i, layers in enumerate(STAGES) for layer in layers}


def _spec(memory: str, schedule: str = "InterleavedZeroBubble") -> Any:
    devices = [{"name": f"cuda:{i}", "memory": memory} for i in range(4)]
    fields = {"microbatches": 4, "schedule": schedule, "layers": LAYERS}
    return load_spec({"devices": devices, **fields})


@pytest.mark.matrix(1)
@pytest.mark.parametrize("processes", [False, True])
def test_what_fits_in_one_process_may_not_under_torchrun(
    planner: Callable[[bool], JudgingPlanner], *, processes: bool
) -> None:
    make, spec = planner(processes), _spec("620MiB")
    plan = make(spec)
    assert plan.fits is not processes
    said, torchrun = make.elsewhere(spec, plan), "with a process per device (torchrun)"
    if processes:
        assert said == "In one process, it fits."
        assert verdict(plan)[0].endswith(f", {torchrun}") and repr(plan).count(torchrun) == 1
    else:
        other = planner(True)(spec).overflow_bytes / 2**20
        assert said == f"{torchrun.capitalize()}, it does not fit, by {other:.2f} MiB."
        assert verdict(plan)[0].startswith("fits: ")
        assert verdict(plan)[0].endswith("MiB, in one process")


def test_nothing_is_said_where_both_are_the_same(
    planner: Callable[[bool], JudgingPlanner],
) -> None:
    make = planner(False)
    for spec in (_spec("700MiB", "GPipe"), _spec("540MiB"), _spec("16GiB")):
        assert make.elsewhere(spec, make(spec)) == ""
    free = _spec("16GiB").model_copy(update={"layers": {}})
    alone = free.with_devices(free.devices[:1])
    assert "process" not in verdict(make(alone))[0] and make.elsewhere(alone, make(alone)) == ""
