"""What is different between two plans, and between two specs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import placer
from placer.plan.types import Origin
from placer.report.differences import Change, differences


def _plan(**fields: object) -> placer.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    devices = [{"name": f"cpu:{i}", "memory": "1GiB"} for i in range(2)]
    spec = {"devices": devices, "layers": {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1", "3": "cpu:1"}}
    return placer.make_plan(model, {**spec, **fields}, torch.ones(8, 64))


def test_plans() -> None:
    before = _plan()
    assert differences(before, before) == []
    moved = {"0": "cpu:0", "1": "cpu:1", "2": "cpu:1", "3": "cpu:1"}
    after = _plan(layers=moved, microbatches=2, checkpoint=["3"])
    found = {change.what: change for change in differences(before, after)}
    assert found["1"] == Change("1", "cpu:0", "cpu:1")
    assert not {"0", "2", "3", "model", "stages", "schedule"} & set(found)
    assert found["microbatches"] == Change("microbatches", "1", "2")
    assert found["recomputed"] == Change("recomputed", "—", "3")
    peaks = [plan.devices[1].peak for plan in (before, after)]
    text = found["tensors on cpu:1"].after
    assert text.endswith(f" ({peaks[1] / peaks[0] - 1:+.0%})".replace("%", " %"))
    assert found["sent per micro-batch"].after.endswith("(-50 %)")


def test_devices_and_seconds_that_only_one_plan_has() -> None:
    before = replace(_plan(), step_seconds=2.0)
    after = replace(before, devices=before.devices[:1], step_seconds=1.5)
    found = {change.what: change for change in differences(before, after)}
    assert set(found) == {"step", "cpu:1 needs"}
    slow = "~ 2.00 s (4 samples/s)"
    assert found["step"] == Change("step", slow, "~ 1.50 s (5.33 samples/s) (-25 %)")
    assert found["cpu:1 needs"].after == "—"
    nearly, other = replace(before, step_seconds=2.001), replace(before, step_seconds=200.0)
    assert differences(before, nearly) == []
    assert differences(before, other) == [
        Change("step", slow, "~ 200.00 s (0.04 samples/s) (100 times)")
    ]


def test_the_kinds_of_devices() -> None:
    plan, made = _plan(), {"command": "", "model": "", "options": {}, "inputs": "", "spec": ""}
    one, other = (replace(plan, origin=Origin(**made, kinds=(k,))) for k in ("t4", "a100"))  # type: ignore[arg-type]
    assert differences(one, other) == [Change("kinds of devices", "t4", "a100")]
    assert differences(plan, other) == []  # made in Python, of nobody knows which


def test_the_same_model_in_another_number_of_shards_is_no_other_model() -> None:
    with torch.device("meta"):
        model, x = nn.Conv2d(1, 1, 3, padding=1), torch.empty(1, 1, 16, 16)
    devices = ["cpu:0", "cpu:1"]
    plans = [placer.make_plan(model, {"devices": devices, "space": n}, x) for n in (1, 2)]
    assert plans[0].fingerprint != plans[1].fingerprint
    what = {change.what for change in differences(*plans)}
    assert "shards" in what and "model" not in what
    spec = {"devices": devices, "space": {"shards": 2, "dims": ["height"]}}
    cut = placer.make_plan(model, spec, x)
    assert Change("space: dims", "—", '["height"]') in differences(plans[1], cut)


def test_specs() -> None:
    before = placer.load_spec({"devices": ["cpu"], "layers": {"a": "cpu", "b": "cpu"}})
    swapped = placer.load_spec({"devices": ["cpu"], "layers": {"b": "cpu", "a": "cpu"}})
    assert differences(before, before) == []
    assert differences(before, swapped) == [
        Change("order of /layers, of which the last wins", "a, b", "b, a")
    ]
    other = placer.load_spec({"devices": ["cpu"], "layers": {"b": "cpu"}, "checkpoint": ["b"]})
    assert differences(before, other) == [
        Change("/layers/a", "cpu", "—"),
        Change("/checkpoint/0", "—", "b"),
    ]
    named = placer.load_spec({"devices": ["cpu"], "layers": {"b": "cpu"}, "loss": "mse_loss"})
    assert differences(named, placer.load_spec({"devices": ["cpu"], "layers": {"b": "cpu"}})) == [
        Change("/loss", "mse_loss", "—")
    ]
    with pytest.raises(TypeError):
        differences(before, _plan())


def test_how_ranks_are_numbered_and_what_they_share_is_told() -> None:
    before = _plan(replicas=2)
    after = replace(before, node_layout="replicas", shard_state="optimizer")
    assert {change.what for change in differences(before, after)} == {"node_layout", "shard_state"}


def test_a_device_of_a_further_replica_in_only_one_plan() -> None:
    stages = _plan()
    replicas = _plan(devices=["cpu:0"], layers={}, replicas=2)
    found = {change.what: change for change in differences(replicas, stages)}
    assert replicas.devices[1].device == "cpu:1"
    assert "—" not in found["cpu:1 needs"].before
