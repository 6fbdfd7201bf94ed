"""Plans as files: nothing is lost, and a changed file is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import plans
import pytest

from placer.errors import PlanError, SpecError
from placer.plan.store import load_plan, plan_from_json, plan_text, plan_to_json, save_plan
from placer.plan.types import (
    Boundary,
    DevicePeak,
    HostPeak,
    Optimality,
    Plan,
    PlannedLoss,
    StageMemory,
    Transfer,
)
from placer.spec import load_spec
from placer.spec.rows import shifted_rows


def make_plan() -> Plan:
    """A plan in which every field differs from its default, and from every other."""
    plan = plans.make_plan()
    stages = tuple(
        dataclasses.replace(
            stage,
            devices=(f"cuda:{stage.index}", f"cuda:{stage.index + 2}"),
            memory=StageMemory(
                parameters=10 + stage.index,
                gradients=11,
                optimizer=20,
                buffers=3,
                saved=40,
                boundary=5,
                transient=6,
                peak=90,
            ),
            budget=2**34 if stage.index else None,
            reserve=2**30 * stage.index,
        )
        for stage in plan.stages
    )
    cut = Boundary(
        index=0, last="up", first="cat", load_before=0.1, load_after=0.2, nbytes=64,
        next_best=None, next_value=None,
    )  # fmt: skip
    return dataclasses.replace(
        plan,
        fits=False,
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
        transfers=(Transfer(value="up", source=0, target=1, nbytes=64),),
        optimality=Optimality(criterion="seconds", value=2.0, lower_bound=1.5),
        extra_seconds=0.25,
        boundaries=(cut,),
        checkpoint=("block.0",),
        offload=("block.1",),
        notes=("a note with ünicode",),
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
    assert data["transfers"] == [{"value": "up", "from": 0, "to": 1, "bytes": 64, "seconds": 0.0}]
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
        loss=PlannedLoss(function="losses.py:dice", target=("2x8:int64<3",), nbytes=5),
        batch_dims={"x": 0},
        stored={"loss": "mean"},
    )
    assert names - {"devices"} | {"version", "checksum", "roles"} == set(plan_to_json(plan))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert set(plan_to_json(make_plan())) == set(plan_to_json(plan))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("listed", [False, True])
def test_devices_are_written_as_roles(shards: int, alike: bool, listed: bool) -> None:
    first = [f"cuda:{i}" for i in range(2 * shards)]
    rows = shifted_rows(first, 5)
    if listed:
        rows[3:] = rows[:2:-1]
    plan = dataclasses.replace(
        make_plan(),
        replicas=5,
        shards=shards,
        stages=tuple(
            dataclasses.replace(
                stage,
                devices=tuple(n for row in rows for n in row[i * shards : (i + 1) * shards]),
            )
            for i, stage in enumerate(make_plan().stages)
        ),
        devices=tuple(
            DevicePeak(device=name, peak=90 + i + (replica > 1 and not alike), budget=80, reserve=i)
            for replica, row in enumerate(rows)
            for i, name in enumerate(row)
        ),
    )
    data = plan_to_json(plan)
    assert plan_from_json(data) == plan
    counts = [role["count"] for role in data["roles"]]
    assert counts == ([5] if alike else [2, 3]) * 2 * shards
    assert [len(stage["devices"]) for stage in data["stages"]] == [
        shards * (5 if listed else 1)
    ] * 2


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


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fits", 1),
        ("stages/1/memory/peak", 91),
        ("stages/1/nodes", ["enc_0"]),
        ("stages/0/memory/peek", 1),
        ("step_seconds", float("nan")),
        ("optimality/value", 2.5),
        ("node_layers/enc_0", "head"),
        ("notes", [b"text"]),
        ("notes", {"text"}),
        ("checksum", None),
    ],
)
def test_a_changed_plan_is_refused(path: str, value: Any) -> None:
    data = copy.deepcopy(plan_to_json(make_plan()))
    _set(data, path, value)
    with pytest.raises(PlanError, match=r"its checksum is another\n  -> plan again"):
        plan_from_json(data)


@pytest.mark.parametrize("key", sorted(set(plan_to_json(make_plan())) - {"version"}))
def test_a_plan_without_one_of_its_keys_is_refused(key: str) -> None:
    data = plan_to_json(make_plan())
    del data[key]
    with pytest.raises(PlanError, match="checksum"):
        plan_from_json(data)


def test_a_file_that_is_laid_out_in_another_way_is_the_same_plan(tmp_path: Path) -> None:
    plan = make_plan()
    text = json.dumps(dict(reversed(plan_to_json(plan).items())), indent=7)
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(
        PlanError, match=rf"its version is {version}; .* reads version 3\n  -> plan"
    ):
        plan_from_json({**plan_to_json(make_plan()), "version": version})


def test_fields_of_another_placer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole file, whose fields are not those of this placer's plans."""
    monkeypatch.setattr("placer.plan.store._checksum", lambda values: "checked")
    data = plan_to_json(make_plan())
    with pytest.raises(PlanError, match=r"plan /colour: Unexpected .*\n  -> plan again"):
        plan_from_json({**data, "colour": "red"})
    wrong = copy.deepcopy(data)
    wrong["stages"][0]["budget"] = 1.5
    with pytest.raises(PlanError, match=r"plan /stages/0/budget: .*valid integer"):
        plan_from_json(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "a JSON object is expected"),
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
    assert "'plan' takes a spec; 'simulate', " in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    save_plan(make_plan(), tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"did you mean '.*plan.json'"):
        load_plan(tmp_path / "plam.json")
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path)
