"""A measured step: the seconds of every stage beside the plan's, its lanes in a trace, names in a profile."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import models
import pytest
import torch
from torch.nn import functional as F

import placer
from placer.report import write_trace


def _placed(replicas: int) -> tuple[placer.PlacedModule, torch.Tensor, torch.Tensor]:
    model, x = models.ConvNet().eval(), torch.randn(8, 1, 8, 8)
    spec = placer.PlacementSpec(
        devices=[{"name": f"cuda:{i}", "memory": "16GiB", "kind": "a100"} for i in range(2)],
        replicas=replicas,
        microbatches=2,
    )
    placed = placer.compile(model, spec, x, run_on="cpu")
    return placed, x, placed(x).detach()


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_stage_of_every_replica_is_measured(replicas: int, tmp_path: Path) -> None:
    placed, x, target = _placed(replicas)
    with pytest.raises(placer.PlacerError, match=r"no step was measured(.|\n)*profile=True"):
        placed.report()
    placed.step(x, target=target, loss_fn=F.mse_loss, profile=True)
    report = placed.report()
    found = {(each.replica, each.stage): each for each in report.stages}
    assert list(found) == [(r, s) for r in range(replicas) for s in range(2)]
    for (replica, stage), each in found.items():
        planned = placed.plan.stages[stage]
        assert each.device == placed.plan.devices_of(planned, replica)[0]
        assert min(each.seconds.forward, each.seconds.backward) > 0
        assert each.seconds.waiting == each.seconds.sending == 0
        assert each.predicted is not None and planned.forward_seconds is not None
        assert each.predicted.forward >= 2 * planned.forward_seconds > 0  # launches take longer
        others = [s.seconds for s in report.stages if s.device == each.device]
        busy = sum(s.forward + s.backward for s in others)
        assert busy + each.seconds.bubble == pytest.approx(report.step_seconds)
    without_optimizer = (placed.plan.step_seconds or 0) - (placed.plan.optimizer_seconds or 0)
    assert report.predicted_seconds == pytest.approx(without_optimizer)
    slowest = report.slowest
    assert all(sum(slowest.seconds[:2]) >= sum(each.seconds[:2]) for each in report.stages)
    text = str(report)
    assert f"slowest: rank 0, stage {slowest.stage} on cpu for {slowest.device}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\w+ [\d.]+$", text, re.MULTILINE)  # no unit is parted from its number
    write_trace(placed.plan, tmp_path / "trace.json", measured=report)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = [
        sorted(
            e["name"] for e in events if e["pid"] == pid and e.get("cat") in ("forward", "backward")
        )
        for pid in (0, 1)
    ]
    assert lanes[0] == lanes[1] and len(lanes[1]) == 8 * replicas


def test_without_a_prediction_no_brackets_are_explained() -> None:
    model, x = models.ConvNet().eval(), torch.randn(8, 1, 8, 8)
    placed = placer.compile(model, {"devices": ["cuda:0", "cuda:1"]}, x, run_on="cpu")
    placed.step(x, target=torch.zeros(8, 10), loss_fn=F.mse_loss, profile=True)
    assert "(" not in str(placed.report())


def test_the_profile_of_torch_names_the_replica_of_every_action() -> None:
    placed, x, target = _placed(replicas=2)
    with torch.profiler.profile() as profile:
        placed.step(x, target=target, loss_fn=F.mse_loss)
    named = [event.name for event in profile.events() if event.name.startswith("replica")]
    assert sorted(named) == [
        f"replica {r} stage {s} {kind}{m}"
        for r, s, kind, m in itertools.product((0, 1), (0, 1), "BF", (0, 1))
    ]


def test_a_file_is_not_taken_for_true() -> None:
    placed, x, target = _placed(replicas=1)
    with pytest.raises(placer.PlacerError, match=r"'step\.json'(.|\n)*write_trace"):
        placed.step(x, target=target, loss_fn=F.mse_loss, profile="step.json")  # type: ignore[arg-type]


def test_an_optimizer_of_the_model_that_was_placed_is_warned_of_once() -> None:
    model, x = models.ConvNet().eval(), torch.randn(8, 1, 8, 8)
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}, x)
    wrong = torch.optim.Adam(model.parameters())
    wrong.step()  # nothing has gradients yet
    placed.step(x, target=torch.zeros(8, 10), loss_fn=F.mse_loss)
    torch.optim.Adam(placed.parameters()).step()
    with pytest.warns(UserWarning, match=r"Adam has parameters(.|\n)*placed\.parameters\(\)"):
        wrong.step()
    wrong.step()
    model(x).sum().backward()  # it may be trained too
    wrong.step()
