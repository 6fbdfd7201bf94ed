"""What long work says: within a second what it does, then what was tried, and the best."""

from __future__ import annotations

import dataclasses
import io
import time

import pytest
import torch
from plans import make_plan
from rich.console import Console
from torch import nn

from placer.cli.progress import Progress, progress
from placer.program import lower
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec

SPEC = PlacementSpec.model_validate({"devices": ["cuda:0", "cuda:1"]})


def test_it_counts_what_was_tried_and_keeps_the_best() -> None:
    told = Progress("looking")
    assert str(told) == "looking (0 s)"
    told.planned(SPEC, make_plan(budget=11 * 2**30))
    told.doing("2 devices, looking for stages")
    best = "2 devices, does not fit by 3.00 GiB"
    assert told.state == (f"looking: 2 devices, looking for stages; tried 1, best so far: {best}")
    told.planned(SPEC, make_plan(), judged=False)
    assert "best so far: 2 devices, by estimate fits, 6.00 s a step" in told.state
    told.planned(SPEC, dataclasses.replace(make_plan(), rank_time=9.0))
    assert told.state.endswith(
        "tried 3, best so far: 2 devices, fits, 6.00 s a step, 2.00 GiB headroom"
    )


def test_it_says_what_size_is_tried() -> None:
    told = Progress("largest", compare=False)
    told.about = "32x32"
    told.doing("looking for stages")
    told.planned(SPEC, make_plan())
    told.found("16x16 fits")
    told.found("32x32 fits")
    assert told.state == "largest: 32x32, looking for stages; tried 1, so far: 32x32 fits"


def test_in_a_pipe_it_writes_lines_when_something_is_new(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placer.cli.progress._EVERY", 0.02)
    with progress(Console(file=io.StringIO()), "working") as told:
        assert capsys.readouterr().err == "working …\n"
        told.doing("half")
        time.sleep(0.2)
    assert capsys.readouterr().err == "  working: half (0 s)\n"


def test_a_planner_tells_what_it_does() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.empty(4, 8)
    make = JudgingPlanner(lower(model, (x,)), [x])
    said: list[str] = []

    class Watcher:
        def doing(self, what: str) -> None:
            said.append(what)

        def planned(self, spec: PlacementSpec, plan: object, *, judged: bool) -> None:
            said.append(f"planned, judged: {judged}")

    make.watcher = Watcher()
    make(SPEC.model_copy(update={"microbatches": 2, "replicas": 2}))
    about = "2 replicas of 2 devices, 2 micro-batches"
    assert said == [
        f"{about}, looking for stages",
        f"{about}, running a step without data",
        "planned, judged: True",
    ]
    make.quick_plan(SPEC)
    assert said[-1] == "planned, judged: False"
