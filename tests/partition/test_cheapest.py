"""Treatments of a stage: labels that are dropped are those that another one is as good as."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unet3d import unet3d

import placer
from placer.partition.policy import cheapest
from placer.partition.policy.labels import KEEP, Label, LabelledStage, StageLimits


def _label(seconds: int, kept: int, worst: int) -> Label:
    return Label(
        seconds=seconds, kept=kept, worst=worst, counted=0, hosted=0, policy=KEEP, span=(0, 1)
    )


@given(st.lists(st.builds(_label, *[st.integers(0, 8)] * 3), max_size=25), st.integers(2, 16))
def test_labels_are_kept_that_no_other_is_as_good_as(labels: list[Label], budget: int) -> None:
    limits = StageLimits(static=0.0, budget=budget, held=2, grown=False)
    found = cheapest._within_budget(labels, 0, limits=limits)
    fitting = [label for label in labels if limits.peak(label) <= budget]
    assert all(label in fitting for label in found)
    costs = [(label.seconds, label.kept, label.worst) for label in found]
    assert len(costs) == len(set(costs))
    for label in fitting:  # some label that is as good by all three was kept
        assert any(
            o.seconds <= label.seconds and o.kept <= label.kept and o.worst <= label.worst
            for o in found
        )
    for label in found:
        better = [o for o in found if o.kept <= label.kept and o.worst <= label.worst]
        assert [o for o in better if o.seconds <= label.seconds] == [label]


def test_the_least_peak_of_a_stage_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its limit is corrected, and whatever limit it is held to."""
    searched: list[tuple[LabelledStage, object]] = []
    search = LabelledStage.search

    def counted(self: LabelledStage, choices: object, select: object) -> object:
        if getattr(select, "func", None) is cheapest._least_peak:
            searched.append((self, choices))
        return search(self, choices, select)  # type: ignore[arg-type]

    lightened = 0
    choose_stage_policy = cheapest.choose_stage_policy

    def choose_policy(*args: object) -> object:
        nonlocal lightened
        lightened += 1
        return choose_stage_policy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(LabelledStage, "search", counted)
    monkeypatch.setattr("placer.planner.activation_policy.choose_stage_policy", choose_policy)
    with torch.device("meta"):
        model, x = unet3d(width=4, depth=3), torch.empty(1, 1, 16, 16, 16)
    spec = {"devices": ["cuda:0", "cuda:1"], "objective": "memory"}
    peak = max(device.peak for device in placer.make_plan(model, spec, x).devices)
    tight = [{"name": f"cuda:{i}", "memory": math.floor(0.5 * peak)} for i in range(2)]
    placer.make_plan(model, spec | {"devices": tight, "reserve": 0, "checkpoint": "auto"}, x)
    assert len({id(stage) for stage, _ in searched}) == len(searched) < lightened
