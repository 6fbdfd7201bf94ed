"""A registered pass that changes the graph goes through everything, without a change elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from rewritten import RELU, TWO, Net, assert_equal_step, batch, make_rewritten_plan
from torch import nn

import placer
from placer.plan.store import load_plan, save_plan
from placer.program import lower
from placer.spec.rewrite import Rewrite


@pytest.fixture(scope="module")
def plan() -> placer.Plan:
    return make_rewritten_plan()


def test_the_program_has_other_nodes_and_another_fingerprint() -> None:
    net = Net()
    plain, rewritten = lower(net, (batch().float(),)), lower(net, (batch().float(),), None, RELU)
    assert not any("relu" in name or "first_2" in name for name in rewritten.nodes)
    assert len(rewritten.nodes) == len(plain.nodes) + 2
    assert [each.layer for each in rewritten.nodes.values()].count("first.2") == 2
    assert rewritten.captured.fingerprint == plain.fingerprint != rewritten.fingerprint


def test_a_plan_keeps_it(plan: placer.Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    assert again.rewrites == RELU


@pytest.mark.matrix(1)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_are_equal_for_other_sizes_and_modes_too(replicas: int, schedule: str) -> None:
    plan = make_rewritten_plan(replicas=replicas, schedule=schedule)
    plain = Net().double()
    placed = placer.compile(copy.deepcopy(plain), plan, batch(8), run_on="cpu")
    for rows, size in ((8, 8), (12, 8), (8, 12), (8, 8)):
        assert_equal_step(placed, plain, batch(rows, size), 2 * replicas)
    plain.load_state_dict(placed.state_dict())  # running statistics are the first replica's
    for size in (8, 12):
        x = batch(8, size)
        torch.testing.assert_close(placed.eval()(x), plain.eval()(x))


def test_dry_runs_copies_and_checkpoints(plan: placer.Plan, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net().double()
    for processes in (False, True):
        report = placer.simulate(net, plan, batch(8), run_on="cpu", processes=processes)
        assert all(device.peak > 0 for device in report.devices)
    placed = copy.deepcopy(placer.compile(copy.deepcopy(net), plan, batch(8), run_on="cpu"))
    assert_equal_step(placed, net, batch(8), 2)
    placer.save(placed, None, tmp_path / "at")
    other = placer.compile(Net().double(), plan, batch(8), run_on="cpu")
    placer.load(other, None, tmp_path / "at")
    x = batch(8)
    torch.testing.assert_close(other.eval()(x), net.eval()(x))


def test_a_plan_is_refused_for_another_model(plan: placer.Plan) -> None:
    net = Net().double()
    net.last[1] = nn.ReLU6()
    with pytest.raises(placer.PlanError, match="another model"):
        placer.compile(net, plan, batch(8), run_on="cpu")


def test_a_rewrite_that_is_not_registered() -> None:
    with pytest.raises(placer.PlanError, match="'windows' is no rewrite of this placer"):
        placer.make_plan(Net(), TWO, batch(8).float(), rewrites=(Rewrite(name="windows"),))
