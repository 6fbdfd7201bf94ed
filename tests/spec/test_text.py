"""Texts of specs: three formats say the same, and every problem has its place in the text."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import placer
from placer import SpecError, load_spec
from placer.cli.sources import load_spec_or_plan
from placer.errors import Location
from placer.spec.load import spec_in
from placer.spec.text import FORMATS, Format, SpecText

SPEC = {
    "devices": ["cuda:0", {"name": "cuda:1", "memory": "16GiB"}],
    "layers": {"encoder": "cuda:0", "head.*": "cuda:1"},
    "training": False,
    "microbatches": 2,
}
JSON5 = """
// two devices
{
\t"devices": ["cuda:0", {name: 'cuda:1', "memory": "16GiB"},], /* a // and "
  quote */
\t"layers": {"encoder": "cuda:0", "head.*": "cuda:1"}, # a third kind of comment
\t"training": false, "microbatches": 2,
}
"""
YAML = """
# two devices
devices:
  - cuda:0
  - {name: cuda:1, memory: 16GiB}
layers:
  encoder: cuda:0
  head.*: cuda:1
training: False
microbatches: 2
"""
TOML = """
# two devices
training = false
devices = [
  "cuda:0",
  {name = "cuda:1", memory = "16GiB"},
]
microbatches = 2

[layers]
encoder = "cuda:0"
"head.*" = "cuda:1"
"""


def _file(folder: Path, ending: str, text: str) -> Path:
    path = folder / f"spec.{ending}"
    path.write_text(text, encoding="utf-8")
    return path


def _error(source: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_spec(source)
    return caught.value


@pytest.mark.parametrize(
    ("ending", "text"),
    [("json", JSON5), ("jsonc", JSON5), ("yaml", YAML), ("yml", json.dumps(SPEC)), ("toml", TOML)],
)
def test_formats_say_the_same(tmp_path: Path, ending: str, text: str) -> None:
    assert load_spec(_file(tmp_path, ending, text)) == load_spec(SPEC)


def test_what_is_json_is_read_as_json() -> None:
    text = '{"a": "\\u00e9\\ud83d\\ude00 // no comment", "b": 1e3, "c": [true, null]}'
    assert SpecText("a", text).values() == json.loads(text)
    assert SpecText("a", f"{text} // c").values()["b"] == 1000


def test_words_of_yaml_are_those_of_json() -> None:
    text = "a: [yes, 012, 1.5, null, '1', ~, TRUE, 1:30]\nno: {x: }"
    values = {"a": ["yes", "012", 1.5, None, "1", None, True, "1:30"], "no": {"x": None}}
    assert SpecText("a", text, "YAML").values() == values


JSON_SLIPS = """{
  "devices": ["cuda:0", {"name": "cuda:1", "memory": "16 giraffes", "knd": 1}],
  "layers": {"encoder": "cuda:0", "head": "cuda:7"},
  "replica": 2, // one
}"""
YAML_SLIPS = """devices:
  - cuda:0
  - name: cuda:1
    memory: 16 giraffes
    knd: 1
layers:
  encoder: cuda:0
  head: cuda:7
replica: 2
"""
TOML_SLIPS = """replica = 2
[[devices]]
name = "cuda:0"
[[devices]]
name = "cuda:1"
memory = "16 giraffes"
knd = 1
[layers]
encoder = "cuda:0"
head = "cuda:7"
"""
SAID = {  # pointer -> what is under the carets, without quotes; what is said
    "/devices/1/memory": ("16 giraffes", "write a number and a unit"),
    "/devices/1/knd": ("knd", "did you mean 'kind'?"),
    "/layers/head": ("cuda:7", "did you mean 'cuda:1'?"),
    "/replica": ("replica", "did you mean 'replicas'?"),
}


@pytest.mark.parametrize(
    ("ending", "text"), [("json", JSON_SLIPS), ("yaml", YAML_SLIPS), ("toml", TOML_SLIPS)]
)
def test_every_problem_has_its_place(tmp_path: Path, ending: str, text: str) -> None:
    path = _file(tmp_path, ending, text)
    error = _error(path)
    found = dict(zip([where for where, *_ in error.problems], error.locations, strict=True))
    assert set(found) == set(SAID)
    lines = text.splitlines()
    for where, (word, said) in SAID.items():
        place = found[where]
        assert place is not None and place.text == lines[place.line - 1]
        start = place.column - 1
        assert place.text[start : start + place.width].strip("'\"") == word
        assert f"{path}:{place.line}:{place.column}: {where}: " in str(error)
        assert said in str(error)
    in_order = [(place.line, place.column) for place in error.locations if place]
    assert in_order == sorted(in_order)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("ending", ["json", "yaml"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            """{"devices": ["cpu"],
"devices": ["cpu"],
"layers": {"encodr": "gpu9"},
"replica": 2}""",
            [
                "2:1: /devices: is written twice",
                "3:12: /layers/encodr: no layer matches 'encodr'",
                "3:22: /layers/encodr: 'gpu9' is not a device",
                "4:1: /replica: is not a key of a placement spec",
            ],
        ),
        (
            """{"device": ["cuda:0", {"name": "cuda:0", "memory": "1 GX"}],
"layers": {"encoder.0-2": "cuda:1"},
"replica": 0}""",
            [
                "1:2: /device: is not a key of a placement spec",
                "1:32: /device/1/name: 'cuda:0' is listed twice",
                "1:52: /device/1/memory: '1 GX' is not a size",
                "2:12: /layers/encoder.0-2: no layer matches 'encoder.0-2'",
                "3:1: /replica: is not a key of a placement spec",
                "3:12: /replica: 0 is not a count",
            ],
        ),
    ],
)
def test_no_slip_hides_another(tmp_path: Path, ending: str, text: str, said: list[str]) -> None:
    path = _file(tmp_path, ending, text)
    with pytest.raises(SpecError) as caught:
        load_spec(path, layer_paths=lambda: ["encoder"])
    lines = str(caught.value).replace(f"{path}:", "").splitlines()
    assert [line for line in lines if line.partition(":")[0].isdecimal()] == said


def test_a_problem_reads_like_one_of_a_compiler(tmp_path: Path) -> None:
    path = _file(tmp_path, "yaml", "devices: [cuda:0]\ntraining: yes\n")
    assert str(_error(path)) == (
        f"{path}:2:11: /training: 'yes' was found where true or false was expected\n"
        "  2 | training: yes\n"
        "    |           ^^^\n"
        "  -> write true"
    )


@pytest.mark.parametrize(
    ("form", "text", "place", "said"),
    [
        ("JSON", '{"devices": ["cuda:0", "cuda:1"', "1:13", "'[' is not closed"),
        ("JSON", '{"devices": ["cuda:0" "cuda:1"]}', "1:23", "expected ','"),
        ("JSON", '{"devices": ["cuda:0, "cuda:1"]}', "1:24", "a quote or a bracket missing"),
        ("JSON", '{"devices": ["cuda:0"]\n "layers": {}}', "2:2", "expected ','"),
        ("JSON", '{"devices": ["cuda:0"}', "1:22", "'}', since '[' of line 1 is open"),
        ("JSON", '{"devices": ["cuda:0"],, }', "1:24", "expected a value, but found ','"),
        ("JSON", '{"devices" ["cuda:0"]}', "1:12", "expected ':'"),
        ("JSON", '{"devices": }', "1:12", "expected a value"),
        ("JSON", '{"devices": [cuda:0]}', "1:14", 'write "cuda:0"'),
        ("JSON", '{"training": ture}', "1:14", "did you mean true?"),
        ("JSON", '{"devices": ["cuda:0]}', "1:14", "is not closed"),
        ("JSON", '{"devices": [],', "1:1", "'{' is not closed"),
        ("JSON", '{"devices": []} x', "1:17", "expected the end"),
        ("JSON", '{"devices": [],\n "devices": []}', "2:2", "/devices: is written twice"),
        ("JSON", "// nothing", "1:1", "nothing but comments"),
        ("JSON", "\0", "1:1", "not text"),
        ("JSON", "[1]", "1:1", "an object was expected"),
        ("YAML", "devices:\n  - cuda:0\n - cuda:1", "3:2", "is it indented like them?"),
        ("YAML", "devices: [cuda:0]\n\ttraining: true", "2:1", "found a tab"),
        ("YAML", "devices: [cuda:0\nlayers: {}", "2:7", "since '[' of line 1 is open"),
        ("YAML", "layers:\n  a: cuda:0\n    b: cuda:1", "3:5", "is it indented like them?"),
        ("YAML", "layers: a: cuda:0", "1:10", "found a second ':'"),
        ("YAML", "layers:\n  a: cuda:0\n  a: cuda:1", "3:3", "/layers/a: is written twice"),
        ("YAML", "devices: [cuda:0]\nreplicas 2\ntraining: true", "2:1", "no ':' after this"),
        ("YAML", "devices: *all", "1:10", "undefined alias"),
        ("YAML", "devices: &all [*all]", "1:1", "nested too deep"),
        ("YAML", "a: &a [x,x]\n" + "b: [*a,*a]\n", "1:1", "/devices: is required"),
        ("TOML", 'devices = ["cuda:0"]\ntraining = yes', "2:12", "write text in quotes"),
        ("TOML", "[layers]\na = 2\na = 3", "3:1", "/layers/a: is written twice"),
        ("TOML", "replicas = 2\nreplicas = 0\nx = ", "3:3", "invalid value"),
        ("TOML", 'devices = ["cuda:0"', "1:19", "unclosed array"),
        ("TOML", "version = 1", "1:1", "/devices: is required"),
        ("TOML", 'devices = ["a"]\nspace.shard = 2', "2:7", "did you mean 'shards'?"),
        ("TOML", 'devices = [\n"cpu", """\nx"""]', "3:1", "is not a device"),
    ],
)
def test_one_slip(tmp_path: Path, form: Format, text: str, place: str, said: str) -> None:
    ending = next(ending for ending, name in FORMATS.items() if name == form)
    path = _file(tmp_path, ending.removeprefix("."), text)
    error = _error(path)
    at = [each for each in error.locations if each and str(each) == f"{path}:{place}"]
    assert at, str(error)
    assert said in str(error)


def test_aliases_of_aliases_are_refused(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "too many values" in str(_error(_file(tmp_path, "yaml", "\n".join(rows))))


def test_of_a_long_line_the_part_is_shown() -> None:
    text = "{" + "x" * 500 + ", wrong: 1, " + "y" * 500 + "}"
    shown = Location(file="a", line=1, column=504, width=5, text=text).excerpt.splitlines()
    assert len(shown[0]) < 90 and shown[0].count("…") == 2
    assert shown[0][shown[1].index("^") : shown[1].rindex("^") + 1] == "wrong"


GOOD: tuple[dict[str, Any], ...] = (
    {
        "version": 1,
        "devices": ["cuda:0", {"name": "cuda:1", "memory": "16GiB", "kind": "h100", "allocator": "default"}],
        "layers": {"enc": "cuda:0"},
        "inputs": {"x": "whole", "y": {"batch_dim": 1, "space_dims": [2, 3]}},
        "stored": {"aux": "mean"},
        "replicas": 2,
        "replica_devices": [["cuda:2", "cuda:3"]],
        "microbatches": 2,
        "schedule": "1F1B",
        "checkpoint": ["enc.*"],
        "offload": "auto",
        "optimizer": {"bytes_per_parameter": 4},
        "loss": {"function": "mse_loss", "target": "2x3"},
        "training": True,
        "reserve": "1GiB",
    },
    {
        "devices": ["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        "space": {"shards": 4, "grid": [2, 2], "dims": ["depth", "height"], "layers": ["enc"]},
    },
    {"machine": "dgx-h100", "stages": 2, "layers": {"enc": "cuda:1"}},
)  # fmt: skip
WRONG = (None, -1, 3.5, "wat", [], {}, [3], {"a": 1}, True, "", 10**6)


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*above, key)
        if isinstance(each, dict | list):
            yield from _paths(each, (*above, key))


def _with_slips(good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``good`` with each of its values replaced, left out, or under a misspelt key."""
    for *above, key in _paths(good):
        for wrong in (*WRONG, "left out", "misspelt"):
            data = copy.deepcopy(good)
            inner: Any = data
            for part in above:
                inner = inner[part]
            if wrong not in ("left out", "misspelt"):
                inner[key] = wrong
            elif isinstance(key, str):
                value = inner.pop(key)
                if wrong == "misspelt":
                    inner[f"{key[:-1]}qx"] = value
            yield data


def test_one_slip_is_one_problem() -> None:
    tried = 0
    for good in GOOD:
        load_spec(good)
        for data in _with_slips(good):
            try:
                load_spec(data)
            except SpecError as error:
                tried += 1
                assert len(error.problems) == 1, (data, str(error))
    assert tried > 400


def test_layers_are_checked_before_the_model_is_recorded(tmp_path: Path) -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            raise AssertionError("was called")

    text = 'devices: [cpu]\nlayers: {encodr: cpu}\ncheckpoint: [encoder, "hed.*"]\n'
    text += "space: {shards: 1, layers: [x]}"
    path = _file(tmp_path, "yaml", text)
    for spec in (path, str(path)):
        with pytest.raises(SpecError) as caught:
            placer.compile(Silent(), spec, (object(),))
        places = [str(place).rpartition("spec.yaml:")[2] for place in caught.value.locations]
        assert places == ["2:10", "3:23", "4:29"]


def test_what_is_found_when_a_plan_is_made_has_a_place_too(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [[1.0, 2.0]] * 4
    import torch

    path = _file(tmp_path, "toml", 'devices = ["cpu"]\nmicrobatches = 2\nbatch_norm = "sync"')
    with pytest.raises(placer.PlacerError) as caught:
        placer.make_plan(model, path, torch.tensor(x))
    assert str(caught.value).startswith(f"{path}:3:14: /batch_norm: 'sync' takes")


@pytest.mark.parametrize(
    ("form", "text"), [("JSON", JSON5), ("YAML", YAML_SLIPS), ("TOML", TOML), ("TOML", TOML_SLIPS)]
)
def test_whatever_is_cut_off_or_doubled_is_an_error_with_a_place(form: Format, text: str) -> None:
    """No slip of an editor ends in a traceback, and each error shows a line of the text."""
    for start in range(0, len(text), 3):
        for changed in (
            text[:start],
            text[:start] + text[start + 2 :],
            text[:start] + text[start - 5 :],
        ):
            source = SpecText("a", changed, form)
            try:
                spec_in(source, source.values())
            except SpecError as error:
                lines = changed.split("\n")
                assert all(
                    place and place.text == lines[place.line - 1] for place in error.locations
                )


def test_a_plan_in_which_a_key_is_written_twice_is_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"stages": [],\n "stages": []}')
    with pytest.raises(SpecError, match=r"plan\.json:2:2: /stages: is written twice"):
        load_spec_or_plan(file)
