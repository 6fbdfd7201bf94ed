"""Plans as files: nothing is lost, and a wrong file is refused with its JSON pointer."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from placer.errors import PlanError, SpecError
from placer.plan.store import load_plan, plan_from_json, plan_text, plan_to_json, save_plan
from placer.plan.types import (
    Boundary,
    DevicePeak,
    HostPeak,
    Optimality,
    Plan,
    StageMemory,
    StagePlan,
    Transfer,
)
from placer.spec import load_spec


def make_plan() -> Plan:
    """A plan in which every field differs from its default, and from every other."""
    stages = tuple(
        StagePlan(
            index=i,
            devices=(f"cuda:{i}", f"cuda:{i + 2}"),
            layers=(f"block.{i}", "head"),
            nodes=(f"conv_{i}", f"relu_{i}"),
            memory=StageMemory(
                parameters=10 + i,
                gradients=11,
                optimizer=20,
                buffers=3,
                saved=40,
                boundary=5,
                transient=6,
                peak=90,
            ),
            budget=2**34 if i else None,
            reserve=2**30 * i,
            forward_seconds=0.1,
            backward_seconds=0.2,
        )
        for i in range(2)
    )
    return Plan(
        fits=False,
        objective="memory",
        processes=True,
        replicas=2,
        microbatches=4,
        schedule="1F1B",
        precision="bf16",
        batch_norm="sync",
        optimizer={"bytes_per_parameter": 6},
        training=False,
        step_seconds=0.41,
        fingerprint="f00",
        stages=stages,
        devices=tuple(
            DevicePeak(device=f"cuda:{i}", peak=90 + i, budget=None if i % 2 else 80, reserve=i)
            for i in range(4)
        ),
        transfers=(Transfer(value="relu_0", source=0, target=1, nbytes=64),),
        optimality=None,
        extra_time=Optimality(criterion="extra seconds", value=2.0, lower_bound=1.5),
        boundaries=(
            Boundary(
                index=0,
                last="relu_0",
                first="conv_1",
                left=0.1,
                right=0.2,
                nbytes=64,
                next_best=None,
                next_value=None,
            ),
        ),
        checkpoint=("block.0",),
        offload=("block.1",),
        notes=("a note with ünicode",),
        node_layers={"conv_0": "block.0", "relu_0": "", "conv_1": "block.1", "relu_1": "head"},
    )


def test_every_field_survives(tmp_path: Path) -> None:
    plan = make_plan()
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    again = dataclasses.replace(plan, optimizer="adam", fits=True)
    assert plan_from_json(plan_to_json(again)) == again


def test_json_has_the_documented_shape() -> None:
    data = plan_to_json(make_plan())
    assert data["transfers"] == [
        {"value": "relu_0", "from": 0, "to": 1, "bytes": 64, "seconds": 0.0}
    ]
    assert list(data["stages"][0]["memory"]) == [
        "parameters", "gradients", "optimizer", "buffers", "saved", "boundary", "transient", "peak",
    ]  # fmt: skip
    documented = {
        "fits", "objective", "replicas", "microbatches", "schedule", "step_seconds", "fingerprint",
        "stages", "transfers", "checkpoint", "offload",
    }  # fmt: skip
    assert documented <= set(data)
    assert json.loads(plan_text(make_plan())) == data


def test_no_field_of_a_plan_is_forgotten() -> None:
    names = {field.name for field in dataclasses.fields(Plan)} - {"rank_time"}
    plan = dataclasses.replace(
        make_plan(),
        microbatches=3,
        example_microbatches=2,
        optimizer_seconds=0.5,
        host=HostPeak(peak=3, reserved=4, budget=None),
    )
    assert names | {"version"} == set(plan_to_json(plan))
    assert plan_from_json(plan_to_json(plan)) == plan
    # Left out where there is none, as in files that were written before they were there.
    later = {"example_microbatches", "optimizer_seconds", "host"}
    assert names - later | {"version"} == set(plan_to_json(make_plan()))


def test_the_text_is_the_same_every_time(tmp_path: Path) -> None:
    text = plan_text(make_plan())
    save_plan(plan_from_json(json.loads(text)), tmp_path / "p.json")
    assert (tmp_path / "p.json").read_text(encoding="utf-8") == text
    assert text.endswith("}\n")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    save_plan(make_plan(), path)
    before = path.read_text(encoding="utf-8")

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(PlanError, match="No space left"):
        save_plan(dataclasses.replace(make_plan(), fits=True), path)
    assert path.read_text(encoding="utf-8") == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_saving_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        save_plan(make_plan(), tmp_path / "nowhere" / "plan.json")


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for part in parents:
        data = data[int(part) if part.isdigit() else part]
    data[last] = value


WRONG = [
    ("fits", "yes", r"/fits: 'yes' where true or false belongs"),
    ("replicas", "2", r"/replicas: '2' where a whole number belongs"),
    ("stages/1/memory/peak", -1, r"/stages/1/memory/peak: -1 where greater than or equal to 0"),
    ("stages/1/memory/peek", 1, r"/stages/1/memory/peek: is not a key of a plan; did you mean"),
    ("stages/0/budget", 1.5, r"/stages/0/budget: 1.5 where a whole number"),
    ("stages/0/index", 3, r"/stages/0/index: 3 where 0 belongs"),
    ("stages/0/devices", ["cuda:0"], r"/stages/0/devices: 1 device"),
    ("stages/0/devices", ["cuda:0", "cuda:9"], r"'cuda:9' has no peak"),
    ("stages/1/nodes", ["conv_0"], r"/stages/1/nodes/0: 'conv_0' is on stage 0"),
    ("transfers/0/to", 7, r"/transfers/0: goes from stage 0 to 7"),
    ("transfers/0/form", 7, r"/transfers/0/form: is not a key of a plan; did you mean 'from'"),
    ("step_seconds", float("nan"), r"/step_seconds: nan where a finite number"),
    ("optimizer", {"bytes_per_parameter": "six"}, r"/optimizer"),
    ("step_second", 1, r"/step_second: is not a key of a plan; did you mean 'step_seconds'"),
    ("version", 2, r"this plan has version 2"),
    ("version", 0, r"this plan has version 0; this placer reads version 1\n  -> plan again$"),
    ("version", True, r"/version: True where 1 belongs"),
    ("version", "1", r"/version: '1' where 1 belongs"),
    ("extra_time/value", "2", r"/extra_time/value: '2' where a number belongs"),
    ("extra_time/valu", 2, r"/extra_time/valu: is not a key of a plan; did you mean 'value'"),
    ("boundaries/0/nbyte", 2, r"/boundaries/0/nbyte: is not a key .* did you mean 'nbytes'"),
    ("stages/0/memory", 3, r"/stages/0/memory: 3 where an object belongs"),
    ("stages/0/nodes", "ab", r"/stages/0/nodes: 'ab' where a list belongs"),
    ("notes", [b"text"], r"/: holds a value that JSON cannot"),
    ("stages", [], r"/stages: \[\] where at least one stage belongs"),
    ("node_layers/a~b", 1, r"/node_layers/a~0b: 1 where text belongs"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_wrong_values_are_refused(path: str, value: Any, message: str) -> None:
    data = copy.deepcopy(plan_to_json(make_plan()))
    _set(data, path, value)
    with pytest.raises(PlanError, match=message) as caught:
        plan_from_json(data)
    assert "\n  -> " in str(caught.value)


@pytest.mark.parametrize("key", sorted(plan_to_json(make_plan())))
def test_missing_keys_are_refused(key: str) -> None:
    data = plan_to_json(make_plan())
    del data[key]
    with pytest.raises(PlanError, match="missing" if key != "stages" else "not a plan"):
        plan_from_json(data)


@pytest.mark.parametrize("key", ["proven", "gap", "criterion"])
def test_missing_figures_of_how_good_it_is_are_refused(key: str) -> None:
    data = plan_to_json(make_plan())
    del data["extra_time"][key]
    with pytest.raises(PlanError, match=f"/extra_time/{key}: is missing"):
        plan_from_json(data)


def test_a_file_that_an_earlier_placer_wrote_is_read_whole() -> None:
    """It has all that a plan had then: replicas, a region, a skip, boundaries, extra time.

    What its placer did not know (what torch's allocator takes, the seconds of launching and of
    transfers) is written as not known.
    """
    path = Path(__file__).with_name("plan_version_1.json")
    plan = load_plan(path)
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(plan_text(plan))
    for device in now["devices"]:
        unknown = {key: device.pop(key) for key in ("workspaces", "context", "starved")}
        assert not any(unknown.values())
        assert device.pop("reserved") is None and device.pop("allocator") is None
    new = ("forward_launch", "backward_launch", "host_copy")
    for stage in now["stages"]:
        assert not any(stage.pop(f"{name}_seconds") for name in new)
        assert not stage.pop("host_copy_nbytes")
    assert not any(transfer.pop("seconds") for transfer in now["transfers"])
    assert now == before
    assert plan.stages[1].regions[0].recompute
    assert plan.extra_time is not None and plan.extra_time.proven
    assert isinstance(plan.boundaries[0], Boundary) and isinstance(plan.stages, tuple)
    assert hash(plan.stages) == hash(load_plan(path).stages)


def test_all_problems_at_once() -> None:
    data = plan_to_json(make_plan())
    data["fits"] = 1
    data["stages"][0]["memory"]["saved"] = None
    with pytest.raises(PlanError) as caught:
        plan_from_json(data, source="plan.json")
    assert "2 problems in the plan" in str(caught.value)
    assert "/fits" in str(caught.value)
    assert "/stages/0/memory/saved" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "an object was expected"),
        ("\x00", "is not JSON"),
        ('{"devices": ["cpu"]}', "is a placement spec, not a plan"),
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=message) as caught:
        load_plan(path)
    assert "plan.json" in str(caught.value)


def test_a_plan_given_as_a_spec_says_how_to_read_it(tmp_path: Path) -> None:
    save_plan(make_plan(), tmp_path / "plan.json")
    with pytest.raises(SpecError, match="is a plan, not a spec") as caught:
        load_spec(tmp_path / "plan.json")
    assert len(caught.value.problems) == 1
    assert "'simulate', 'verify' and 'report' take a plan" in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    save_plan(make_plan(), tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"did you mean '.*plan.json'"):
        load_plan(tmp_path / "plam.json")
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path)
