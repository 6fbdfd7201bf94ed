"""A step in time, as bars and as a trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from plans import make_plan

import placer
from placer.plan.step_spans import step_spans
from placer.report.trace import step_trace, write_trace
from placer.report.view import Part, view


def test_a_bar_per_device_with_what_it_computes_when() -> None:
    """Two stages of 1 s forward, 2 s backward: the second computes in the middle of the 6 s."""
    first, second = view(make_plan()).step
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert first.figure.text == second.figure.text == "50% busy"
    assert second.parts == [
        Part("forward", 1 / 6, 1 / 6, "1F0: 1.00 s"), Part("backward", 1 / 3, 1 / 3, "1B0: 2.00 s")
    ]  # fmt: skip


def test_a_page_of_too_many_spans_has_no_bars() -> None:
    assert not view(dataclasses.replace(make_plan(), microbatches=5000)).step


@pytest.mark.parametrize("processes", [False, True])
def test_a_trace_has_every_span_on_all_that_it_keeps_busy(processes: bool, tmp_path: Path) -> None:
    plan = make_plan()
    moved = tuple(dataclasses.replace(t, seconds=0.5) for t in plan.transfers)
    plan = dataclasses.replace(
        plan, transfers=moved, processes=processes, microbatches=3, optimizer_seconds=1.0
    )
    path = tmp_path / "trace.json"
    write_trace(plan, path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace == step_trace(plan)
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    found = [
        (e["name"], names[e["tid"]], e["ts"], e["ts"] + e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    wanted = [(s.name, on, s.start * 1e6, s.end * 1e6) for s in step_spans(plan) for on in s.on]
    assert found == wanted
    assert ("cuda:0 to cuda:1" in names.values()) == processes
    with pytest.raises(placer.PlanError, match="cannot be written"):
        write_trace(plan, tmp_path / "nowhere" / "trace.json")
