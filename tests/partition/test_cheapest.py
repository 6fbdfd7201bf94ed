"""The search for a stage's policy: a partial policy is dropped if another one is at least as good."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unet3d import unet3d

import placer
from placer.partition.policy import cheapest
from placer.partition.policy.search import PolicySearch
from placer.partition.policy.types import KEEP, PartialPolicy, StageLimits


def _partial(seconds: int, kept: int, backward_peak: int, hosted: int = 0) -> PartialPolicy:
    return PartialPolicy(
        seconds=seconds,
        kept=kept,
        backward_peak=backward_peak,
        on_device=0,
        on_host=0,
        hosted=hosted,
        policy=KEEP,
        span=(0, 1),
    )


@given(st.lists(st.builds(_partial, *[st.integers(0, 8)] * 3), max_size=25), st.integers(2, 16))
def test_a_partial_policy_is_kept_if_no_other_is_as_good(
    partials: list[PartialPolicy], budget: int
) -> None:
    limits = StageLimits(static=0.0, budget=budget, in_flight=2, all_gradients=False)
    found = cheapest._within_budget(partials, 0, limits=limits)
    fitting = [one for one in partials if limits.peak(one) <= budget]
    assert all(one in fitting for one in found)
    costs = [(one.seconds, one.kept, one.backward_peak) for one in found]
    assert len(costs) == len(set(costs))
    for one in fitting:  # one that is as good in all three sums was kept
        assert any(
            o.seconds <= one.seconds and o.kept <= one.kept and o.backward_peak <= one.backward_peak
            for o in found
        )
    for one in found:
        better = [o for o in found if o.kept <= one.kept and o.backward_peak <= one.backward_peak]
        assert [o for o in better if o.seconds <= one.seconds] == [one]


@given(st.lists(st.builds(_partial, *[st.integers(0, 8)] * 4), max_size=25), st.integers(0, 8))
def test_what_waits_on_the_host_is_one_of_the_sums(
    partials: list[PartialPolicy], host_budget: int
) -> None:
    """Rounded up to levels: a policy is not dropped for one on a higher level."""
    limits = StageLimits(
        static=0.0, budget=12, in_flight=2, all_gradients=False, host_budget=host_budget
    )
    found = cheapest._within_both(partials, 0, limits=limits)
    assert all(one.hosted <= host_budget and limits.peak(one) <= 12 for one in found)
    step = host_budget / cheapest._HOST_LEVELS
    for one in filter(limits.fits, partials):
        assert any(
            o.seconds <= one.seconds
            and o.kept <= one.kept
            and o.backward_peak <= one.backward_peak
            and o.hosted <= one.hosted + step
            for o in found
        )


def test_the_least_peak_of_a_stage_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its limit is corrected, and whatever the limit is."""
    searched: list[tuple[PolicySearch, object]] = []
    search = PolicySearch.search

    def counted(self: PolicySearch, choices: object, select: object) -> object:
        if getattr(select, "func", None) is cheapest._not_dominated:
            searched.append((self, choices))
        return search(self, choices, select)  # type: ignore[arg-type]

    lightened = 0
    choose_stage_policy = cheapest.choose_stage_policy

    def choose_policy(*args: object) -> object:
        nonlocal lightened
        lightened += 1
        return choose_stage_policy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(PolicySearch, "search", counted)
    monkeypatch.setattr("placer.planner.activation_policy.choose_stage_policy", choose_policy)
    with torch.device("meta"):
        model, x = unet3d(width=4, depth=3), torch.empty(1, 1, 16, 16, 16)
    spec = {"devices": ["cuda:0", "cuda:1"], "objective": "memory"}
    peak = max(device.peak for device in placer.make_plan(model, spec, x).devices)
    tight = [{"name": f"cuda:{i}", "memory": math.floor(0.5 * peak)} for i in range(2)]
    placer.make_plan(model, spec | {"devices": tight, "reserve": 0, "checkpoint": "auto"}, x)
    assert len({id(stage) for stage, _ in searched}) == len(searched) < lightened
