"""Spec files in commands: what `check` tells other programs, and `import` and `export`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., Any]
X = ("--input", "8x64")
WRONG = 'devices: [cuda:0]\nlayers:\n  hed: cuda:0\n  blocks: "cuda:1"\nreplica: 2\n'
BY_HAND = """
import torch
from torch import nn


class ByHand(nn.Module):
    def __init__(self, moved=True):
        super().__init__()
        self.a, self.b, self.free = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        if moved:
            self.a, self.b = self.a.to("cuda:0"), self.b.cuda(1)

    def forward(self, x):
        x = self.a(x.to("cuda:0"))
        return self.free(self.b(x.to("cuda:1")).relu())
"""


@pytest.fixture
def wrong(folder: Path) -> str:
    (folder / "wrong.yaml").write_text(WRONG)
    return "wrong.yaml"


def test_check_tells_code_scanners(placer: Run, wrong: str) -> None:
    result = placer("check", wrong, "--format", "sarif")
    assert result.exit_code == 2 and "error: wrong.yaml: 2 problems" in result.stderr
    (run,) = json.loads(result.stdout)["runs"]
    assert run["tool"]["driver"]["rules"] == [{"id": "SpecError"}]
    first, second = run["results"]
    assert "/layers/blocks: 'cuda:1' is not one of" in first["message"]["text"]
    place = second["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": wrong}
    assert place["region"] == {"startLine": 5, "startColumn": 1, "endColumn": 8}
    fine = json.loads(placer("check", "fits.json", "--format", "sarif").stdout)
    assert fine["runs"][0]["results"] == []


@pytest.mark.usefixtures("no_remedies")
def test_check_annotates_a_workflow(placer: Run, wrong: str) -> None:
    first, second = placer("check", wrong, "--format", "github").stdout.splitlines()
    assert first.startswith("::error title=placer,file=wrong.yaml,line=4,col=11,endColumn=19::/lay")
    assert second.endswith(
        "::/replica: is not a key of a placement spec%0A  -> did you mean 'replicas'?"
    )
    assert placer("check", "net.py:Net", "fits.json", *X, "--format", "github").stdout == ""
    small = placer("check", "net.py:Net", "tight.json", *X, "--format", "github")
    assert small.exit_code == 3
    assert small.stdout.startswith("::error title=placer,file=tight.json::device cpu:")


def test_errors_in_json_have_lines(placer: Run, wrong: str) -> None:
    error = json.loads(placer("plan", "net.py:Net", wrong, *X, "--json").stdout)["error"]
    places = [(each["file"], each["line"], each["column"]) for each in error["problems"]]
    assert places == [(wrong, 3, 3), (wrong, 4, 11), (wrong, 5, 1)]


def test_a_misspelt_layer_costs_no_capture(placer: Run) -> None:
    result = placer("plan", "net.py:Net", "wrong.json", *X)
    assert "recording" not in result.stderr and "did you mean 'head'?" in result.stderr


def test_a_spec_of_a_model_that_is_split_by_hand(placer: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "by_hand.py").write_text(BY_HAND)
    result = placer("import", "by_hand.py:ByHand")
    assert "not on a device, so placer chooses: free" in result.stderr
    spec = json.loads(result.stdout)
    layers = {"a": "cuda:0", "b": "cuda:1"}
    assert spec == {"devices": ["cuda:0", "cuda:1"], "layers": layers}
    (folder / "part.py").write_text(BY_HAND.replace('self.a.to("cuda:0")', "self.a"))
    part = json.loads(placer("import", "part.py:ByHand").stdout)
    assert part == {"devices": ["cuda:1"], "layers": {"b": "cuda:1"}}  # not "**"
    unknown = placer("import", "by_hand.py:ByHand", "-m", "moved=false")
    assert unknown.exit_code == 2 and "give --input, so that its forward" in unknown.stderr
    if not torch.cuda.is_available():
        moved = placer("plan", "by_hand.py:ByHand", "fits.json", "--input", "4x4")
        assert (
            moved.exit_code == 2 and "give --ignore-device-moves; 'placer import'" in moved.stderr
        )
    path = tmp_path / "spec.json"
    given = ("by_hand.py:ByHand", "-m", "moved=false", "--input", "4x4")
    assert placer("import", *given, "-o", str(path)).exit_code == 0
    assert json.loads(path.read_text())["layers"] == {**layers, "free": "cuda:1"}
    equal = placer("verify", given[0], str(path), *given[1:], "--ignore-device-moves", "--double")
    assert equal.exit_code == 0, equal.stderr
    map_file = tmp_path / "map.json"
    assert placer("export", given[0], str(path), "-o", str(map_file)).exit_code == 0
    assert json.loads(map_file.read_text()) == {"a": 0, "b": 1, "free": 1}
    again = placer("import", str(map_file))
    assert json.loads(again.stdout) == json.loads(path.read_text())
    map_file.write_text('{"a": 0, "b.weight": 1, "free": 1}')
    assert "b.weight" in placer("import", str(map_file)).stdout
    known = placer("import", str(map_file), "--model", "by_hand.py:ByHand", "-m", "moved=false")
    assert json.loads(known.stdout)["layers"] == {"a": "cuda:0", "free": "cuda:1"}
    assert "left out, because parameters are where they are read: b.weight\n" in known.stderr


def test_what_is_no_device_map_is_refused_with_its_place(placer: Run, folder: Path) -> None:
    (folder / "map.json").write_text('{"a": 0,\n "b": "disk"}')
    refused = placer("import", "map.json")
    assert refused.exit_code == 2 and refused.stdout == ""
    assert (
        "error: map.json:2:7: /b: with 'disk', accelerate keeps weights on disk" in refused.stderr
    )
    assert "fits.json: is not a device_map" in placer("import", "fits.json").stderr
    free = placer("export", "net.py:Net", "fits.json")
    assert "make a plan, which does" in free.stderr


def test_two_plans_are_compared(placer: Run, folder: Path, tmp_path: Path) -> None:
    one, other = (str(tmp_path / name) for name in ("one.json", "other.json"))
    placer("plan", "net.py:Net", "fits.json", *X, "-o", one)
    placer("plan", "net.py:Net", "pinned.json", *X, "-o", other)
    same = placer("diff", one, one)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    result = placer("diff", one, other, "--json")
    assert result.exit_code == 1
    changes = json.loads(result.stdout)["changes"]
    assert {"what": "microbatches", "before": "1", "after": "2"} in changes
    (folder / "infer.json").write_text('{"devices": ["cuda:0"], "training": false}')
    (folder / "train.json").write_text('{"devices": ["cuda:0"]}')
    specs = json.loads(placer("diff", "infer.json", "train.json", "--json").stdout)["changes"]
    assert specs == [{"what": "/training", "before": "no", "after": "yes"}]
    mixed = placer("diff", "fits.json", one)
    assert mixed.exit_code == 2 and "the other file is a plan" in mixed.stderr
    assert "per micro-batch forward" in placer("explain", other).stdout


def test_a_changed_spec_is_compared_with_the_spec(placer: Run) -> None:
    given = ("what-if", "net.py:Net", "pinned.json", *X)
    changes = json.loads(placer(*given, "--microbatches", "1", "--json").stdout)
    assert changes["fits"] is True
    assert changes["changes"][0] == {"what": "microbatches", "before": "2", "after": "1"}
    fewer = placer(*given, "--devices", "1").stdout  # where its layer "head" cannot be
    assert "placed anew: head (was on cuda:1)\n" in fewer and "fits: cuda:0" in fewer
    tight = placer("what-if", "net.py:Net", "tight.json", *X, "--precision", "fp32")
    assert tight.exit_code == 3
    assert "change nothing" in placer(*given).stderr
    Path("whole.json").write_text('{"devices": ["cuda:0"], "layers": {"**": "cuda:0"}}')
    idle = placer("what-if", "net.py:Net", "whole.json", *X, "--devices", "3")
    assert "note: Nothing runs on cuda:1, cuda:2." in idle.stdout
    assert "did you mean '1F1B'?" in placer(*given, "--schedule", "1f1").stderr


def test_what_if_the_devices_were_others(placer: Run, folder: Path) -> None:
    (folder / "known.json").write_text(
        '{"devices": [{"name": "cuda:0", "kind": "t4"}], "replicas": 2}'
    )
    given = ("what-if", "net.py:Net", "known.json", *X, "--json")

    def changes(*options: str) -> list[Any]:
        found = json.loads(placer(*given, *options).stdout)["changes"]
        return [(each["what"], each["before"], each["after"]) for each in found]

    assert ("cuda:0 has", "14.56 GiB", "23.50 GiB (+61 %)") in changes("--kind", "rtx4090")
    other = changes("-d", "cuda:0=8GiB,cuda:1=8GiB", "--replicas", "1")
    assert ("cuda:0 has", "14.56 GiB", "8.00 GiB (-45 %)") in other and (
        "stages",
        "1",
        "2",
    ) in other
    both = placer(*given, "-d", "cuda:0=8GiB", "--devices", "2")
    assert both.exit_code == 2 and "leave out one of them" in both.stderr
    wrong = placer("what-if", "net.py:Net", "known.json", *X, "-d", "cuda:0=8GX")
    assert "--device cuda:0=8GX: '8GX' is not a size" in wrong.stderr


def test_what_if_a_spec_names_a_machine(placer: Run, folder: Path) -> None:
    (folder / "machine.json").write_text('{"machine": "dgx-a100", "stages": 2}')
    given = ("what-if", "net.py:Net", "machine.json", *X, "--json")
    more, other = placer(*given, "--devices", "1"), placer(*given, "--kind", "h100")
    assert more.exit_code == other.exit_code == 0, more.stderr + other.stderr
    stages = {"what": "stages", "before": "2", "after": "1"}
    assert stages in json.loads(more.stdout)["changes"]
    (folder / "machine.json").write_text('{"machine": "dgx-a100", "stages": 1, "space": 2}')
    odd = placer(*given, "--devices", "3")
    assert odd.exit_code == 2 and "give a multiple of 2, its devices per stage" in odd.stderr


def test_a_plan_file_is_enough_to_ask_what_if(placer: Run) -> None:
    made = ("plan", "net.py:Net", "pinned.json", *X, "-o", "asked.json")
    assert placer(*made).exit_code == 0
    whole = placer("what-if", "net.py:Net", "pinned.json", *X, "--microbatches", "1")
    assert placer("what-if", "asked.json", "--microbatches", "1").stdout == whole.stdout
    twice = placer("what-if", "asked.json", *X, "--microbatches", "1")
    assert twice.exit_code == 2 and "leave them out, or give MODEL and SPEC" in twice.stderr
    page = placer("report", "asked.json", "-o", "asked.html")
    assert page.exit_code == 0 and "net.py:Net" in Path("asked.html").read_text(encoding="utf-8")
    no_spec = placer("what-if", "net.py:Net", *X, "--microbatches", "1")
    assert no_spec.exit_code == 2 and "SPEC: is missing" in no_spec.stderr
    assert placer("what-if", "asked.json", "--microbatches", "2").stdout.startswith("no diff")


def test_a_plan_file_is_asked_from_another_folder(
    placer: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plans").mkdir()
    (folder / "loss.py").write_text("def loss(x):\n    return x.sum()\n")
    made = ("plan", "net.py:Net", "pinned.json", *X, "-o", "plans/asked.json")
    assert placer(*made, "--loss", "loss.py:loss").exit_code == 0
    monkeypatch.chdir(tmp_path)
    asked = placer("what-if", str(folder / "plans/asked.json"), "--microbatches", "1")
    assert asked.exit_code == 0, asked.stderr
    (folder / "plans/asked.json").rename("asked.json")
    alone = placer("what-if", "asked.json", "--microbatches", "1")
    assert alone.exit_code == 2 and "in the folder where the plan was made" in alone.stderr


@pytest.mark.parametrize("command", ["simulate", "verify", "export"])
def test_a_plan_file_is_enough_to_run_it(command: str, placer: Run) -> None:
    assert placer("plan", "net.py:Net", "pinned.json", *X, "-o", "run.json").exit_code == 0
    inputs = () if command == "export" else X
    whole = placer(command, "net.py:Net", "run.json", *inputs)
    alone = placer(command, "run.json")
    assert (alone.exit_code, alone.stdout) == (whole.exit_code, whole.stdout) != (0, "")
    no_spec = placer(command, "net.py:Net", *inputs)
    assert no_spec.exit_code == 2 and "SPEC: is missing" in no_spec.stderr


def test_one_run_shows_misspelt_layers_beside_other_errors(placer: Run, wrong: str) -> None:
    result = placer("plan", "net.py:Net", wrong, *X)
    assert result.exit_code == 2 and "error: wrong.yaml: 3 problems" in result.stderr
    assert "wrong.yaml:3:3: /layers/hed: no layer matches 'hed'" in result.stderr
    assert "did you mean 'head'?" in result.stderr
    without = placer(
        "plan", "net.py:Missing", wrong, *X
    )  # no such model: only what is seen without
    assert without.exit_code == 2 and "error: wrong.yaml: 2 problems" in without.stderr


def test_a_spec_with_a_number_of_stages_is_no_plan(placer: Run, folder: Path) -> None:
    (folder / "staged.json").write_text('{"devices": ["cpu:0", "cpu:1"], "stages": 2}')
    result = placer("simulate", "net.py:Net", "staged.json", *X)
    assert result.exit_code == 0, result.stderr
