"""A step in time, as lanes and as a trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from plans import make_plan
from torch import nn

import placer
from placer.plan.step_spans import step_spans
from placer.report.trace import step_trace, write_trace


@pytest.mark.parametrize("processes", [False, True])
def test_a_trace_has_every_span_on_all_that_it_keeps_busy(processes: bool, tmp_path: Path) -> None:
    plan = make_plan()
    moved = tuple(dataclasses.replace(t, seconds=1 / 3) for t in plan.transfers)
    plan = dataclasses.replace(
        plan, transfers=moved, processes=processes, microbatches=3, optimizer_seconds=1 / 7
    )
    path = tmp_path / "trace.json"
    write_trace(plan, path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace == step_trace(plan)
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    # As Perfetto reads it: microseconds to whole nanoseconds, start and length apart.
    found = [
        (
            e["name"],
            names[e["tid"]],
            round(e["ts"] * 1e3),
            round(e["ts"] * 1e3) + round(e["dur"] * 1e3),
        )
        for e in events
        if e["ph"] == "X"
    ]
    wanted = [
        (s.name, on, round(s.start * 1e9), round(s.end * 1e9))
        for s in step_spans(plan)
        for on in s.on
    ]
    assert found == wanted
    assert ("cuda:0 to cuda:1" in names.values()) == processes
    with pytest.raises(placer.PlanError, match="cannot be written"):
        write_trace(plan, tmp_path / "nowhere" / "trace.json")


def test_a_trace_counts_the_bytes_of_every_device() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(8, 64)
    devices = [{"name": f"cuda:{i}", "kind": "h100"} for i in range(2)]
    spec = {"devices": devices, "layers": {"0": "cuda:0", "1": "cuda:1"}}
    plan = placer.make_plan(model, spec, x)
    trace = step_trace(plan, placer.simulate(model, plan, x))
    most: dict[str, int] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            assert 0 <= event["ts"] <= round((plan.step_seconds or 0) * 1e9) / 1e3
            most[event["name"]] = max(most.get(event["name"], 0), sum(event["args"].values()))
    assert most == {f"memory of {device.device}": device.peak for device in plan.devices}


def test_a_trace_has_one_of_the_replicas_that_do_the_same() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(8, 64)
    devices = [{"name": f"cuda:{i}", "kind": "h100"} for i in range(2)]
    spec = {"devices": devices, "layers": {"0": "cuda:0", "1": "cuda:1"}, "replicas": 2}
    rows = {
        processes: {e["args"]["name"] for e in step_trace(plan)["traceEvents"] if e["ph"] == "M"}
        for processes in (False, True)
        for plan in [placer.make_plan(model, spec, x, processes=processes)]
    }
    assert {"predicted", "cuda:0", "cuda:1", "cuda:2", "cuda:3"} <= rows[False]
    assert {"predicted, every replica", "cuda:0", "cuda:1"} <= rows[True]
    assert not {"cuda:2", "cuda:3"} & rows[True]
