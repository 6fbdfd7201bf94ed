"""How often the model runs on fake tensors for one answer; each run takes a second for a large model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from unet3d import unet3d

import placer
from placer.cost import estimate
from placer.program import lower
from placer.search.remedies import memory_needed, misfit_error
from placer.simulation import judge
from placer.simulation.judge import JudgingPlanner

MODEL = unet3d(width=4, depth=3)
X = torch.randn(8, 1, 16, 16, 16)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts cost runs (forward and backward of the graph) and dry runs (of the emitted module)."""
    counts: Counter[str] = Counter()

    def counted(name: str, run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return run(*args, **kwargs)

        return call

    monkeypatch.setattr(estimate, "record_run", counted("cost", estimate.record_run))
    monkeypatch.setattr(judge, "dry_run", counted("dry", judge.dry_run))
    return counts


def _spec(memory: int, **fields: Any) -> placer.PlacementSpec:
    devices = [{"name": f"cpu:{i}", "memory": memory} for i in range(2)]
    fixed = {"reserve": 0, "optimizer": "sgd", "loss": "mean_square"}
    return placer.load_spec({"devices": devices, **fixed, **fields})


@pytest.mark.matrix(0)
def test_all_remedies_of_a_misfit_take_few_runs(runs: Counter[str]) -> None:
    program = lower(MODEL, (X,))
    peak = max(
        d.peak for d in JudgingPlanner(program, [X])(_spec(2**40, objective="memory")).devices
    )
    runs.clear()
    make = JudgingPlanner(program, [X])
    spec = _spec(int(0.7 * peak))
    plan = make(spec)
    error = misfit_error(spec, plan, make)
    assert not plan.fits
    fitting = " ".join(tried.change for tried in error.tried if tried.fits)
    assert "microbatches" in fitting and "checkpoint" in fitting and "add " in fitting
    # The batch, the same in chunks and in parts, one size of micro-batch, and what offloading takes.
    assert runs["cost"] <= 5
    assert runs["dry"] <= 8  # of the plans that a user would get, where they are near the budget
    runs.clear()
    assert "devices of" in memory_needed(spec, make)
    assert runs["cost"] == 0 and runs["dry"] <= 2


def test_a_plan_is_dry_run_once(runs: Counter[str]) -> None:
    program = lower(MODEL, (X,))
    peak = max(
        d.peak for d in JudgingPlanner(program, [X])(_spec(2**40, objective="memory")).devices
    )
    make = JudgingPlanner(program, [X])
    runs.clear()
    first = make(_spec(int(1.05 * peak), objective="memory"))
    again = make(_spec(int(1.06 * peak), objective="memory"))
    assert [s.nodes for s in first.stages] == [s.nodes for s in again.stages]
    assert runs["dry"] == 1
    assert runs["cost"] == 1


def test_what_is_offloaded_is_run_for_only_where_something_is(runs: Counter[str]) -> None:
    assert JudgingPlanner(lower(MODEL, (X,)), [X])(_spec(2**40, offload="auto")).fits
    assert runs["cost"] == 1


def test_a_guess_makes_no_run(runs: Counter[str]) -> None:
    make = JudgingPlanner(lower(MODEL, (X,)), [X])
    make(_spec(2**40))
    runs.clear()
    guessed = make.rough_plan(_spec(2**40, microbatches=4))
    assert runs["cost"] == 0
    planned = make.quick_plan(_spec(2**40, microbatches=4))
    assert runs["cost"] == 1
    peaks = [max(d.peak for d in plan.devices) for plan in (guessed, planned)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
