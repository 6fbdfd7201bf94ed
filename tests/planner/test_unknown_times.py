"""Without the kind of a device, a plan has no times, but the stages that reference rates choose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captured import captured_once
from torch import nn

import placer
from placer.errors import SpecError
from placer.plan.store import plan_from_json, plan_to_json
from placer.plan.types import Plan
from placer.report.html import page

MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
X = torch.randn(32, 64)


def _plan(*kinds: str | None, **fields: Any) -> Plan:
    devices = [
        {"name": f"cuda:{i}", "memory": "16 G", **({"kind": kind} if kind else {})}
        for i, kind in enumerate(kinds)
    ]
    return placer.make_plan(MODEL, {"devices": devices, **fields}, X)


def _seconds(data: Any) -> Iterator[Any]:
    """The values of all keys with "seconds" in ``data``."""
    if isinstance(data, dict):
        yield from (value for key, value in data.items() if "seconds" in key)
    for value in (
        data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    ):
        yield from _seconds(value)


@pytest.mark.matrix(1)
@captured_once()
@pytest.mark.parametrize("kinds", [(None, None), ("h100", None)])
def test_every_time_is_unknown_if_one_kind_is(kinds: tuple[str | None, ...]) -> None:
    plan = _plan(*kinds, microbatches=2)
    data = plan_to_json(plan)
    found = list(_seconds(data))
    assert len(found) > 10 and set(found) == {None}
    assert plan.step_seconds is plan.stages[0].forward_seconds is plan.transfers[0].seconds is None
    assert plan_from_json(data) == plan
    unknown = ", ".join(f"cuda:{i}" for i, kind in enumerate(kinds) if kind is None)
    note = plan.notes[-1]
    assert note.startswith(f"Times are not known, because the kind of {unknown} is not; ")
    assert 'give --kind, or "kind" in the spec; nearest by memory: p100 (15.89 GiB), a4000' in note
    said = plan.explain()
    assert "by reference rates, share of this plan's: 100.0%" in said
    assert not re.search(r"\d (s|ms|us)\b", said)
    html = page(plan)
    assert "time of a step is not known" in html and "A step in time" not in html
    assert "forward, backward" not in html and "are idle" not in html


@captured_once()
def test_the_stages_are_those_of_the_reference_rates() -> None:
    known, unknown = _plan("a100", "a100"), _plan(None, None)
    assert [s.nodes for s in unknown.stages] == [s.nodes for s in known.stages]
    assert known.step_seconds and known.stages[0].forward_seconds
    assert not any("Times are not known" in note for note in known.notes)
    assert "forward, backward" in page(known)


@captured_once()
def test_a_cpu_is_of_the_kind_that_its_name_says() -> None:
    assert placer.make_plan(MODEL, {"devices": ["cpu:0", "cpu:1"]}, X).step_seconds


def test_automatic_specs_ask_where_time_decides() -> None:
    devices = [{"name": f"cuda:{i}", "memory": "16GiB"} for i in range(2)]
    with pytest.raises(SpecError, match=r"kind of cuda:0, cuda:1 is not .* fastest way"):
        placer.auto_spec(MODEL, X, devices=devices)
    assert len(placer.auto_spec(MODEL, X, devices=devices, objective="devices").devices) == 1
