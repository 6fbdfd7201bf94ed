"""Specs: what is read, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from placer import PlacementSpec, SpecError, load_spec
from placer.spec import DeviceSpec, schema_text, spec_schema
from placer.spec.options import SpecFields

ROOT = Path(__file__).parents[2]


def _problems(data: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(SpecError) as error:
        load_spec(data)
    return list(error.value.problems)


def test_defaults_are_those_of_the_design() -> None:
    spec = load_spec({"devices": ["cuda:0"]})
    assert (spec.version, spec.layers, spec.replicas, spec.microbatches) == (1, {}, 1, 1)
    assert (spec.schedule, spec.precision, spec.batch_norm) == ("GPipe", "fp32", "per_microbatch")
    assert (spec.optimizer, spec.training, spec.objective) == ("adam", True, "throughput")
    assert (spec.checkpoint, spec.offload, spec.reserve) == ((), (), None)


def test_sizes_names_and_case() -> None:
    spec = load_spec(
        {
            "$schema": "./placement.schema.json",
            "devices": ["cuda", {"name": "cuda:1", "memory": "500 MB", "kind": "h100"}],
            "schedule": "interleaved1f1b",
            "reserve": "1GiB",
            "optimizer": {"bytes_per_parameter": 12},
        }
    )
    assert spec.devices == (
        DeviceSpec(name="cuda:0"),
        DeviceSpec(name="cuda:1", memory=500_000_000, kind="h100"),
    )
    assert spec.schedule == "Interleaved1F1B"
    assert spec.reserve == 2**30


def test_kinds_of_devices_are_those_of_the_catalogue() -> None:
    spec = load_spec({"devices": [{"name": "cuda:0", "kind": "H100"}]})
    assert spec.devices[0].kind == "h100"
    found = _problems({"devices": ["cuda:0", {"name": "cuda:1", "kind": "h10"}], "replicas": 0})
    assert [where for where, *_ in found] == ["/devices/1/kind", "/replicas"]
    assert found[0][1] == "'h10' is not a device kind in the catalogue"
    assert found[0][2].startswith("did you mean 'h100'? known are")
    with pytest.raises(SpecError) as caught:
        load_spec({"devices": [{"name": f"cuda:{i}", "kind": "h10"} for i in range(3)]})
    assert str(caught.value).count("known are") == 1
    assert str(caught.value).count("-> as above") == 2


def test_every_problem_at_once_with_its_place_and_the_nearest_choice() -> None:
    problems = _problems(
        {
            "devcies": 1,
            "devices": ["cuda:0", {"name": "cdua:1", "memory": "16 giraffes", "knd": 1}],
            "layers": {"a/b": "cuda:7"},
            "replicas": "two",
            "schedule": "gpip",
            "training": "yes",
            "optimizer": "adm",
            "microbatches": True,
        }
    )
    by_place = {where: (problem, remedy) for where, problem, remedy in problems}
    assert set(by_place) == {
        "/devcies", "/devices/1/name", "/devices/1/memory", "/devices/1/knd", "/layers/a~1b",
        "/replicas", "/schedule", "/training", "/optimizer", "/microbatches",
    }  # fmt: skip
    assert "'devices'" in by_place["/devcies"][1]
    assert "'cuda:1'" in by_place["/devices/1/name"][1]
    assert "16GiB" in by_place["/devices/1/memory"][1]
    assert "'kind'" in by_place["/devices/1/knd"][1]
    assert "'cuda:0'" in by_place["/layers/a~1b"][1]
    assert "'GPipe'" in by_place["/schedule"][1]
    assert "true or false" in by_place["/training"][0]
    assert "'adam'" in by_place["/optimizer"][1]


@pytest.mark.parametrize(
    ("data", "where", "said"),
    [
        ({}, "/devices", "required"),
        ({"devices": []}, "/devices", "empty"),
        ({"devices": "cuda:0"}, "/devices", "a list"),
        ({"devices": ["cuda:0"], "machine": "dgx-a100"}, "/machine", "leave out one of them"),
        (
            {"machine": "dgx-a100", "stages": 3, "replicas": 3},
            "/replicas",
            "3 replicas of 3 devices each, and the machine has 8 devices write at most 2",
        ),
        ({"machine": "dgx-a100", "stages": 2, "layers": {"a": "cuda:2"}}, "/layers/a", "'cuda:1'?"),
        ({"devices": ["cuda:0"], "offload_overlap": True}, "/offload_overlap", "no effect"),
        ({"devices": [3]}, "/devices/0", "a device name or an object"),
        ({"devices": ["cpu", "cpu"]}, "/devices/1", "twice"),
        ({"devices": ["cuda:0"], "version": 2}, "/version", "1"),
        ({"devices": ["cuda:0"], "reserve": -1}, "/reserve", "-1"),
        ({"devices": ["cuda:0"], "microbatches": 0}, "/microbatches", "0"),
        ({"devices": ["cuda:0"], "microbatches": "4"}, "/microbatches", "write 4 without quotes"),
        ({"devices": ["cuda:0"], "layers": {"a": 0}}, "/layers/a", "did you mean 'cuda:0'?"),
        ({"devices": ["cuda:0"], "layers": {"a": {"b": "cuda:0"}}}, "/layers/a", '"a.b"'),
        ({"devices": ["cuda:0"], "layers": {"replicas": 2}}, "/layers/replicas", "outside of"),
        ({"devices": ["cuda:0"], "checkpoint": "all"}, "/checkpoint", "'auto'"),
        ({"devices": ["cuda:0", "cuda:2"], "replicas": 2}, "/replicas", "cuda:2"),
        (
            {"devices": ["cuda:0"], "replica_devices": [["cuda:1", "cuda:2"]], "replicas": 2},
            "/replica_devices/0",
            "2 devices where",
        ),
        (
            {"devices": ["cuda:0"], "replica_devices": [["cuda:0"]], "replicas": 2},
            "/replica_devices/0/0",
            "already",
        ),
        (
            {"devices": ["cuda:0"], "replica_devices": [["cuda:1"]], "replicas": 3},
            "/replica_devices",
            "1 row for 3 replicas",
        ),
        ('{"devices": ["cuda:0"], "devices": ["cpu"]}', "/devices", "twice"),
        ('{"devices": ["cuda:0"]', "", "is not JSON: '{' is not closed"),
        ({"devices": ["cpu:0", "cpu"]}, "/devices/1", "twice"),
        ({"devices": ["cuda:01"]}, "/devices/0", "did you mean 'cuda:1'?"),
        ({"devices": ["gpu:3"]}, "/devices/0", "did you mean 'cuda:3'?"),
        ({"devices": ["cuda0"]}, "/devices/0", "did you mean 'cuda:0'?"),
        ({"devices": ["cuda:0=8GiB"]}, "/devices/0", '{"name": "cuda:0", "memory": "8GiB"}'),
        ({"devices": ["cuda:0"], "precision": "float16"}, "/precision", "write 'fp16'"),
        ({"devices": ["cuda:0"], "precision": "torch.bfloat16"}, "/precision", "write 'bf16'"),
        ({"devices": [{"name": "cuda:0", "memory": 0}]}, "/devices/0/memory", "0 bytes"),
        ({"devices": [{"name": "cuda:0", "memory": 16}]}, "/devices/0/memory", "'16GiB'?"),
        ({"devices": ["cuda:0"], "reserve": -5}, "/reserve", "'500 MB'"),
        ({"devices": [{"name": "cuda:0", "memory": "16GiBi"}]}, "/devices/0/memory", "'16GiB'?"),
        (
            {"devices": [{"name": "cuda:0", "memory": "9" * 400 + "GiB"}]},
            "/devices/0/memory",
            "more bytes than",
        ),
        ({"devices": ["cuda:0"], "replicas": 10**30}, "/replicas", "more than 65536"),
        ({"devices": None}, "/devices", "null was found"),
        ({"devices": ["cuda:0"], "version": "1"}, "/version", "'1' was found where 1"),
        (
            {"devices": ["cpu"], "replicas": 2, "replica_devices": ["cpu:1"]},
            "/replica_devices/0",
            "a list",
        ),
        ('{"devices": ["cuda:0"], "replicas": ' + "1" * 5000 + "}", "", "digits"),
        ('{"devices": ' + "[" * 5_000, "", "is nested too deep"),
    ],
)
def test_one_wrong_thing(data: Any, where: str, said: str) -> None:
    (problem,) = _problems(data)
    assert problem[0] == where
    assert said in " ".join(problem[1:])
    assert "/devices" not in problem[2] or "machine" not in data


def test_many_problems_are_told_in_few_lines() -> None:
    layers = {f"blocks.{number}": "cuda:7" for number in range(500)}
    with pytest.raises(SpecError) as error:
        load_spec({"devices": ["cuda:0"], "layers": layers})
    assert len(error.value.problems) == 500
    assert str(error.value).startswith("placement spec: 500 problems\n")
    assert str(error.value).endswith("\n… and 480 more")
    assert str(error.value).count("is not one of the devices") == 20


def test_no_guess_is_made_where_no_word_is_near() -> None:
    (problem,) = _problems({"devices": ["cuda:0"], "precision": "fp8"})
    assert problem == (
        "/precision",
        "'fp8' is not one of fp32, bf16, fp16",
        "",
    )


def test_devices_that_cannot_be_shifted_for_as_many_replicas_as_the_machine_has() -> None:
    """With "auto" how many there are is known when it is planned."""
    spec = PlacementSpec(devices=["cuda:0", "cuda:2"], replicas="auto")
    assert spec.device_rows(1) == [["cuda:0", "cuda:2"]]
    with pytest.raises(SpecError, match=r"'cuda:2' would be in two replicas"):
        spec.device_rows(2)


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "unet.json"
    path.write_text('{"devices": []}')
    with pytest.raises(SpecError, match=r"unet\.json"):
        load_spec(path)
    (problem,) = _problems(tmp_path / "unte.json")
    assert "unet.json" in problem[2]
    with pytest.raises(SpecError) as missing:
        load_spec(tmp_path / "unte.json")
    first = str(missing.value).splitlines()[0]
    assert first == f"{tmp_path / 'unte.json'}: no such file"  # and no count of problems in a spec
    (tmp_path / "e.json").write_text("{}")
    ((_, _, remedy),) = _problems(tmp_path / "nothere.json")
    assert remedy == "check the path"  # and not e.json, of which only the ending is alike
    assert str(pickle.loads(pickle.dumps(missing.value))) == str(missing.value)
    path.write_text("[1, 2]")
    with pytest.raises(SpecError, match="object was expected"):
        load_spec(path)


def test_round_trip_through_json() -> None:
    spec = PlacementSpec(
        devices=["cuda:0", {"name": "cuda:1", "memory": "16GiB"}],  # type: ignore[arg-type]
        layers={"decoder.*": "cuda:1"},
        microbatches="auto",
        optimizer="sgd",
        checkpoint=["encoder"],  # type: ignore[arg-type]
    )
    text = spec.to_json()
    assert load_spec(text) == spec
    assert json.loads(text)["devices"] == ["cuda:0", {"name": "cuda:1", "memory": "16GiB"}]
    assert "replicas" not in json.loads(text)


def test_rows_of_further_replicas() -> None:
    spec = PlacementSpec(devices=["cuda:0", "cuda:1"], replicas=2)  # type: ignore[arg-type]
    assert spec.device_rows(2) == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    given = PlacementSpec(devices=["cuda:1"], replicas=2, replica_devices=[["cuda:5"]])  # type: ignore[arg-type]
    assert given.device_rows(2) == [["cuda:1"], ["cuda:5"]]


def test_the_schema_file_is_the_models_schema() -> None:
    assert (ROOT / "specs/placement.schema.json").read_text() == schema_text(), (
        "run: placer schema > specs/placement.schema.json"
    )


def test_the_schema_documents_every_field_and_accepts_what_load_accepts() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = spec_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name, field in schema["properties"].items():
        assert field.get("description"), name
    good = {"devices": ["cuda:0", {"name": "cpu", "memory": "2 GB"}], "replicas": "auto"}
    assert validator.is_valid(good)
    load_spec(good)
    for bad in ({}, {"devices": [1]}, {**good, "replicas": 0}, {**good, "extra": 1}):
        assert not validator.is_valid(bad)


def test_every_committed_spec_loads() -> None:
    files = [p for p in (ROOT / "specs").glob("*.json") if p.name != "placement.schema.json"]
    for path in files:
        load_spec(path)


def test_reading_a_spec_imports_no_torch() -> None:
    code = (
        "import sys, placer; placer.load_spec({'devices': ['cpu']});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_that_editors_and_slips_leave(tmp_path: Path) -> None:
    path = tmp_path / "unet.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"devices": ["cpu"]}')  # a byte order mark
    assert load_spec(path).devices == (DeviceSpec(name="cpu"),)
    path.write_text(" \n")
    assert "there is no text" in _problems(path)[0][1]
    path.write_bytes(bytes(range(256)))
    assert "byte 128 is not UTF-8" in _problems(path)[0][1]
    assert "it is a folder" in _problems(tmp_path)[0][1]


@pytest.mark.parametrize("text", ["16GiB", "16 G", "16 g", "16g", "16Gi", 2**34])
def test_the_size_of_a_card_is_in_gib(text: str | int) -> None:
    (device,) = load_spec({"devices": [{"name": "cuda:0", "memory": text}]}).devices
    assert device.memory == 2**34
    (decimal,) = load_spec({"devices": [{"name": "cuda:0", "memory": "16 GB"}]}).devices
    assert decimal.memory == 16 * 10**9


def test_python_functions_take_the_fields_of_a_spec() -> None:
    others = {"schema_uri", "devices", "loss"}
    assert set(SpecFields.__annotations__) == set(PlacementSpec.model_fields) - others


def test_values_are_told_in_the_words_of_json() -> None:
    wrong = {"devices": ["cuda:0"], "layers": {"a": ["cuda:0"]}, "checkpoint": True}
    with pytest.raises(SpecError) as caught:
        load_spec(wrong)
    text = str(caught.value)
    assert '["cuda:0"] is not a device' in text
    assert "true is not a list of layer patterns" in text and 'write ["encoder.*"] or' in text


@pytest.mark.parametrize(("kind", "near"), [
    ("rtx3060", "rtx3060-12gb"), ("rtx3070ti", "rtx3070"), (4090, "rtx4090"),
    ("NVIDIA GeForce RTX 3090", "rtx3090"), ("NVIDIA A100-SXM4-80GB", "a100"),
])  # fmt: skip
def test_the_beginning_of_a_kind_suggests_it(kind: object, near: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean '{near}'"):
        load_spec({"devices": [{"name": "cuda:0", "kind": kind}]})


def test_a_number_of_replicas_that_divide_nothing() -> None:
    given = {"devices": ["cpu"], "replicas": 4, "shard_over": 2}
    ((where, problem, remedy),) = _problems(given)
    assert where == "/shard_over" and "no effect" in problem and "optimizer" in remedy
    load_spec({**given, "shard_state": "optimizer"})
    load_spec({**given, "shard_over": "auto"})


def test_a_spec_of_auto_that_offloads_nothing_loads() -> None:
    given = load_spec({"devices": ["cpu"], "offload": "auto", "offload_overlap": True})
    chosen = given.model_copy(update={"offload": ()})
    assert load_spec(chosen.to_json()) == load_spec({"devices": ["cpu"]})
