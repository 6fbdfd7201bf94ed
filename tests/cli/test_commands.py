"""Every command works: its text for people, its JSON for machines, and its exit code."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placer.plan.store import load_plan
from placer.spec import load_spec

Run = Callable[..., Any]
X = ("--input", "8x64")


def test_plan_json_is_only_json(placer: Run, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    page = tmp_path / "plan.html"
    result = placer(
        "plan", "net.py:Net", "fits.json", *X, "--json", "-o", str(saved), "--html", str(page)
    )
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["fits"] is True
    assert data == json.loads(saved.read_text(encoding="utf-8"))
    assert [stage["devices"] for stage in data["stages"]] == [["cuda:0"], ["cuda:1"]]
    assert {t["from"] for t in data["transfers"]} == {0}
    assert "cuda:0" in result.stderr
    text = page.read_text(encoding="utf-8")
    assert "<b>net.py:Net</b> with 8x64, on 2 devices" in text and 'class="plot"' in text
    assert "&#34;reserve&#34;: 0" in text  # the spec


def test_no_name_and_no_path_is_broken(
    placer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "8")
    saved = str(tmp_path / "[one] plan.json")
    assert (
        f"plan written to {saved}\n"
        in placer("plan", "net.py:Net", "fits.json", *X, "-o", saved).stdout
    )
    assert "blocks.0.a …" in placer("explain", saved).stdout
    assert "split: blocks.0" in placer("check", "net.py:Net", *X).stdout


def test_a_plan_that_does_not_fit_says_what_would(
    placer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "plan.html"
    monkeypatch.setenv("COLUMNS", "80")
    result = placer("plan", "net.py:Net", "tight.json", *X, "--html", str(page))
    assert result.exit_code == 3
    assert "does not fit: cpu:0 is" in result.stdout
    assert "KiB over" in result.stdout
    assert "what would make it fit:" in result.stdout
    assert "like cpu:1 (cpu:2" in result.stdout
    assert "devices of" in result.stdout
    _, _, items = result.stdout.partition("what would make it fit:\n")
    assert "\n    " in items and all(
        line.startswith(("  ", "tried")) for line in items.splitlines()
    )
    text = page.read_text(encoding="utf-8")
    assert "What would make it fit" in text and "like cpu:1 (cpu:2" in text
    # Progress is told in lines where nobody watches; on a slow machine, lines with more about each follow.
    lines = [line for line in result.stderr.splitlines() if not line.startswith("  ")]
    assert [line.endswith(" …") for line in lines] == [True] * len(lines)
    assert "recording the operations of the model …" in lines
    assert "planning changes that may make it fit …" in lines


_LOSS = """
import torch

def bias(output, target):
    wide = output[:, :1] * torch.ones(1, 2**16)  # takes 2 MiB of 8 rows, for backward as well
    return (wide.exp().mean(1) - target["y"]).abs().mean()

def target():
    return {"y": torch.ones(8)}
"""
_BIAS = ("--loss", "losses.py:bias", "--target", "losses.py:target")


def test_the_loss_is_counted_by_every_command(placer: Run, tmp_path: Path) -> None:
    Path("losses.py").write_text(_LOSS, encoding="utf-8")
    spec, plan = tmp_path / "spec.json", tmp_path / "plan.json"
    net = ("net.py:Net", *X, "-m", "depth=1")
    device = ("-d", "cpu:0=6MiB", "--microbatches", "1", "--no-checkpoint")
    result = placer("auto", *net, *device, *_BIAS, "-o", str(spec), "--plan", str(plan))
    assert (
        result.exit_code == 3
        and "the largest single node, head (head) with the loss" in " ".join(result.stdout.split())
    )
    assert placer("auto", *net, *device, "-o", str(spec)).exit_code == 0
    device = ("-d", "cpu:0=9MiB", *device[2:])
    result = placer("auto", *net, *device, *_BIAS, "-o", str(spec), "--plan", str(plan))
    assert result.exit_code == 0
    assert "note: The loss losses.py:bias takes" in " ".join(result.stdout.split())
    assert json.loads(spec.read_text())["loss"] == {
        "function": "losses.py:bias",
        "target": "losses.py:target",
    }
    peak = load_plan(plan).devices[0].peak
    Path("free.json").write_text('{"devices": ["cpu:0"]}')
    for command, source, options in (
        ("plan", spec, ()), ("plan", "free.json", _BIAS), ("check", "free.json", _BIAS),
        ("simulate", plan, ()), ("simulate", "free.json", _BIAS),
    ):  # fmt: skip
        result = placer(command, *net, str(source), *options, "--json")
        assert result.exit_code == 0, result.output
        assert "losses.py:bias" in result.stderr
        data = json.loads(result.stdout)
        if command == "simulate":
            assert data["devices"]["cpu:0"]["peak"] == peak
        elif command == "plan":
            assert data["roles"][0]["memory"]["peak"] == peak
    result = placer("simulate", *net, str(plan), "--loss", "mean_square", "--json")
    assert json.loads(result.stdout)["devices"]["cpu:0"]["peak"] < peak / 2
    assert placer("verify", *net, str(spec)).exit_code == 0
    result = placer("check", *net, *_BIAS, "--json")
    assert json.loads(result.stdout)["loss"]["function"] == "losses.py:bias"
    result = placer("check", *net, "--json")
    assert json.loads(result.stdout)["loss"]["assumed"] is True


def test_auto_does_not_split_what_plan_would_not(placer: Run, tmp_path: Path) -> None:
    spec = str(tmp_path / "spec.json")
    towers = ("net.py:Towers", "--input", "x=131072x64", "--input", "y=131072x64")
    found = placer("auto", *towers, "-d", "cuda:0,cuda:1", "--kind", "t4", "-o", spec)
    said = " ".join(found.stdout.split())
    assert "note: The batch is not split" in said and "batch.y: has shape [" in said
    assert placer("plan", *towers, spec).exit_code == 0
    Path("halved.json").write_text('{"devices": ["cuda:0"], "microbatches": 2}')
    assert "cannot tell" in placer("plan", *towers, "halved.json").stderr


def test_auto_does_not_split_where_a_whole_layer_mixes_rows(placer: Run) -> None:
    net = ("net.py:Sorted", "--input", "131072x64")
    found = placer("auto", *net, "-d", "cuda:0,cuda:1", "--kind", "t4", "-o", "sorted.json")
    said = " ".join(found.stdout.split())
    assert "note: The batch is not split. blocks.0: it computes along the rows" in said
    assert "note: blocks.0, blocks.1 stay whole, each on one device: it computes something" in said
    assert placer("plan", *net, "sorted.json").exit_code == 0


def test_the_arguments_of_model_and_forward(placer: Run) -> None:
    result = placer(
        "plan", "net.py:Net", "fits.json", "-i", "4x8", "-i", "scale=4x8", "--kwarg", "twice=true",
        "-m", "width=8", "-m", "depth=1", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    nodes = [node for stage in json.loads(result.stdout)["stages"] for node in stage["nodes"]]
    assert sum("blocks_0_a" in node for node in nodes) == 2  # called twice
    assert any("mul" in node for node in nodes)


def test_models_that_cannot_be_built_on_meta(placer: Run) -> None:
    assert placer("plan", "net.py:Words", "fits.json", "-i", "2x5:int64<11").exit_code == 0


def test_a_plan_for_processes_has_the_peaks_of_its_ranks(placer: Run, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    result = placer("plan", "net.py:Net", "fits.json", *X, "--processes", "-o", str(saved))
    assert result.exit_code == 0
    assert "with a process per device (torchrun)" in result.stdout
    result = placer("simulate", "net.py:Net", str(saved), *X, "--processes", "--json")
    for device in json.loads(result.stdout)["devices"].values():
        assert device["peak"] == device["predicted"]


def test_simulate_judges_the_prediction(placer: Run) -> None:
    result = placer("simulate", "net.py:Net", "fits.json", *X, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["step_ok"] is True
    assert set(data["devices"]) == {"cuda:0", "cuda:1"}
    for device in data["devices"].values():
        assert device["predicted"] == pytest.approx(device["peak"], rel=0.05)
    for device in ("cuda:0", "cuda:1"):
        assert f"{device} at its peak, " in result.stderr
    assert "parameter" in result.stderr
    assert placer("simulate", "net.py:Net", "tiny.json", *X).exit_code == 3


def test_a_saved_plan_serves_as_a_spec(placer: Run, tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    assert placer("plan", "net.py:Net", "pinned.json", *X, "-o", saved).exit_code == 0
    assert placer("simulate", "net.py:Net", saved, *X).exit_code == 0
    assert placer("verify", "net.py:Net", saved, *X).exit_code == 0
    other = placer("simulate", "net.py:Net", saved, *X, "-m", "depth=2")
    assert other.exit_code == 2
    assert f"error: {saved}: was made for another model" in other.stderr
    assert f"plan again: placer plan MODEL SPEC --input … -o {saved}" in other.stderr
    assert "far off" not in placer("simulate", "net.py:Net", saved, *X).stdout
    larger = placer("simulate", "net.py:Net", saved, "--input", "512x64")
    assert "made for inputs of another size" in " ".join(larger.stdout.split())


def test_verify_proves_equality(placer: Run) -> None:
    result = placer("verify", "net.py:Net", "pinned.json", *X, "--double", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["equal"] is True
    kinds = {c["kind"] for c in data["comparisons"]}
    assert {"loss", "output", "gradient", "parameter", "mode", "attribute"} <= kinds
    assert [found["equal"] for found in data["situations"]] == [True] * 7
    assert all(c["tolerance"] == 1e-10 for c in data["comparisons"])
    assert "EQUAL" in result.stderr
    rows = [line.split("  ") for line in result.stderr.splitlines()]
    verdicts = {row[0]: row[-1].strip() for row in rows if row[0].startswith(("train", "eval"))}
    assert verdicts == dict.fromkeys(
        (
            "train: the example",
            "train: other values",
            "train: another batch size",
            "train, step: other values",
            "train, no_grad: other values",
            "eval: other values",
            "eval, no_grad: other values",
        ),
        "EQUAL",
    )


def test_verify_says_which_tensors_differ(placer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from placer.verification import observation

    made = observation.relative_error

    def off(found: Any, expected: Any, least: float) -> float:
        shape = getattr(found, "shape", None)
        return 0.5 if shape == (2, 64) else made(found, expected, least)

    monkeypatch.setattr(observation, "relative_error", off)
    result = placer("verify", "net.py:Net", "pinned.json", *X)
    assert result.exit_code == 1
    assert (
        "train: the example:\n  gradient of head.weight: relative error 5.00e-01" in result.stdout
    )
    assert "DIFFERENT" in result.stdout and "try --double" in result.stdout
    assert (
        "try --double" not in placer("verify", "net.py:Net", "pinned.json", *X, "--double").stdout
    )


def test_auto_writes_a_spec_that_fits(placer: Run, tmp_path: Path) -> None:
    spec, plan = tmp_path / "spec.json", tmp_path / "plan.json"
    result = placer(
        "auto", "net.py:Net", *X, "-d", "cpu:0=300KiB", "-d", "cpu:1=300KiB", "-d", "cpu:2=1GiB",
        "--reserve", "0", "--optimizer", "adamw", "--microbatches", "2",
        "--objective", "throughput", "-o", str(spec), "--plan", str(plan),
    )  # fmt: skip
    assert result.exit_code == 0, result.stdout
    written = load_spec(spec)
    assert written.optimizer == "adamw"
    assert written.microbatches == 2
    assert load_plan(plan).fits
    assert placer("plan", "net.py:Net", str(spec), *X).exit_code == 0


def test_auto_splits_inputs_as_it_is_told(placer: Run) -> None:
    command = (
        "auto",
        "net.py:Net",
        *X,
        "--input",
        "scale=8x1",
        "-d",
        "cuda:0=1GiB",
        "--kind",
        "h100",
    )
    result = placer(*command, "--split", "scale=whole")
    assert result.exit_code == 0 and json.loads(result.stdout)["inputs"] == {"scale": "whole"}
    for given, told in (
        ("scale", "--split scale: does not say how"),
        ("scale=hole", "--split: 'hole'"),
    ):
        wrong = placer(*command, "--split", given)
        assert wrong.exit_code == 2 and told in wrong.stderr


def test_auto_prints_the_spec_without_a_file(placer: Run) -> None:
    result = placer(
        "auto",
        "net.py:Net",
        *X,
        "-d",
        "cuda:0=1GiB,cuda:1=1GiB",
        "--kind",
        "h100",
        "--reserve",
        "0",
    )
    assert result.exit_code == 0
    spec = load_spec(json.loads(result.stdout))
    assert [(d.name, d.kind) for d in spec.devices] == [("cuda:0", "h100")]  # one is faster
    assert "fits:" in result.stderr


def test_auto_says_why_nothing_fits(placer: Run) -> None:
    command = ("auto", "net.py:Net", *X, "-m", "depth=1", "-d", "cpu:0=100KiB", "--reserve", "0")
    result = placer(*command, "--json")
    assert result.exit_code == 3
    data = json.loads(result.stdout)
    assert data["fits"] is False
    assert data["device"] == "cpu:0"
    assert data["missing_bytes"] > 0
    assert any("cpu:1" in remedy for remedy in data["remedies"])
    assert "what would make it fit" in result.stderr
    assert "tried:" in result.stderr


@pytest.mark.usefixtures("no_remedies")
def test_check_a_spec(placer: Run, tmp_path: Path) -> None:
    result = placer("check", "net.py:Net", "pinned.json")
    assert result.exit_code == 0
    assert "pinned.json is valid for net.py:Net: it places 1 of 11 layers" in result.stdout
    assert "not in the spec, so placer chooses: blocks\n" in result.stdout
    data = json.loads(placer("check", "net.py:Net", "pinned.json", *X, "--json").stdout)
    assert data["valid"] is True
    assert data["fits"] is True
    timed = placer("check", "net.py:Net", "pinned.json", *X, "--kind", "h100").stdout
    assert "estimated step ~ " in timed and "give --kind" not in timed
    assert placer("check", "net.py:Net", "tight.json", *X).exit_code == 3
    wrong = placer("check", "net.py:Net", "wrong.json")
    assert wrong.exit_code == 2
    assert "no layer matches 'hed'" in wrong.stderr
    assert "did you mean 'head'" in wrong.stderr
    every = tmp_path / "every.json"
    every.write_text('{"devices": ["cuda:0"], "layers": {"blocks.*": "cuda:0", "head": "cuda:0"}}')
    assert "it places 11 of 11 layers\n" in placer("check", "net.py:Net", str(every)).stdout
    free = placer("check", "net.py:Net", "fits.json").stdout
    assert "it leaves the choice for all 11 layers to placer" in free


def test_the_help_names_every_exit_code(placer: Run) -> None:
    said = " ".join(placer("--help").stdout.split())
    for code in ("0 success", "1 a difference was found", "2 bad usage", "3 the placement"):
        assert code in said
    assert "--no-offload-overlap" in placer("auto", "--help").stdout
    assert "default: (1)" in placer("check", "--help").stdout
    assert "default: (" not in placer("what-if", "--help").stdout  # there it is the spec's


def test_check_a_model(placer: Run) -> None:
    result = placer("check", "net.py:Net", *X, "--memory", "300KiB", "--memory", "2GiB", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["pieces"] == sum(data["pieces_per_layer"].values())
    assert data["whole_modules"] == []
    assert data["devices_needed"] == {"300KiB": None, "2GiB": 1}
    assert data["kept_free"]["2GiB"] == 520 * 2**20 + int(0.02 * 2**31)
    said = " ".join(result.stderr.split())
    assert (
        "does not fit on up to 64 devices of 300KiB, of which context and what is kept free take 520.01"
        in said
    )
    assert "fits on 1 device of 2GiB on smaller ones: at least " in said
    assert "needs Tried in one process: precision fp32, microbatches 1, " in said
    assert "replicas 1, training True, optimizer adam; without recomputing or offloading" in said
    largest = data["largest_piece"]
    assert largest["peak"] >= largest["least_bytes"] > 4 * 64 * 64 * 4  # weights, gradients, Adam
    assert 1 < largest["least_devices"] <= 7  # of seven like layers and a small one
    assert "largest piece that cannot be split: " in said and " on a device of its own" in said


def test_check_claims_only_what_it_tried(placer: Run) -> None:
    """Each of the options makes activations smaller, so that fewer devices are needed."""
    command = ("check", "net.py:Net", "--input", "131072x64", "--memory", "700 m")
    plain = placer(*command)
    assert "fits on 3 devices of 700 m" in plain.stdout
    assert "Tried in one process: precision fp32, microbatches 1" in plain.stdout
    whole = json.loads(placer(*command, "--json").stdout)
    assert whole["devices_needed"] == {"700 m": 3}
    changes = ("microbatches", "4", 2), ("replicas", "2", 1), ("precision", "bf16", 2)
    for option, value, needed in changes:
        found = json.loads(placer(*command, f"--{option}", value, "--json").stdout)
        assert str(found["tried"][option]) == value
        assert found["devices_needed"] == {"700 m": needed}
        assert found["largest_piece"]["peak"] < whole["largest_piece"]["peak"]
    few = placer("check", "net.py:Net", *X, "--microbatches", "4", "--replicas", "4")
    assert "error: --microbatches, --replicas: the batch of the example has 8 rows" in few.stderr


def test_check_a_spec_alone(placer: Run, folder: Path) -> None:
    fits = placer("check", "pinned.json")
    assert fits.exit_code == 0
    assert "pinned.json is a valid spec for cuda:0, cuda:1 1.00 GiB" in fits.stdout
    assert (
        "to check its 1 pattern of layers, name the model: placer check MODEL pinned.json"
        in fits.stdout
    )
    assert json.loads(placer("check", "fits.json", "--json").stdout)["valid"] is True
    wrong = placer("check", "unknown_key.json")
    assert wrong.exit_code == 2 and "did you mean 'replicas'?" in wrong.stderr
    assert "did you mean 'fits.json'?" in placer("check", "fit.json").stderr
    assert "is a spec, and --input is for a model" in placer("check", "fits.json", *X).stderr


@pytest.mark.matrix(1)
@pytest.mark.parametrize("example", ["two_scenes", "scenes_by_name", "both_ways"])
def test_a_callable_makes_the_arguments_of_forward(placer: Run, example: str) -> None:
    inputs = ("--input", f"net.py:{example}")
    planned = placer("plan", "net.py:Scenes", "halves.json", *inputs)
    assert planned.exit_code == 0
    assert "cuda:1" in planned.stdout
    verified = placer("verify", "net.py:Scenes", "halves.json", *inputs, "--double")
    assert verified.exit_code == 0
    assert "EQUAL" in verified.stdout


def test_check_says_how_a_model_that_stays_whole_can_be_split(placer: Run) -> None:
    result = placer("check", "net.py:Chooser", "--input", "3x4")
    assert "stays whole" in result.stdout and "the model itself" in result.stdout
    assert "move this code into a submodule" in result.stdout


def test_check_names_whole_modules_and_why(placer: Run) -> None:
    result = placer("check", "net.py:Picky", "--input", "3x4")
    assert result.exit_code == 0
    (row,) = [line for line in result.stdout.splitlines() if "Chooser" in line]
    assert row.startswith("inner  ")
    assert "its Python code depends on the value of a tensor" in row
    assert "net.py:" in result.stdout
    unknown = json.loads(placer("check", "net.py:Picky", "--input", "3x4", "--json").stdout)
    (inner,) = unknown["whole_modules"]
    assert inner["share_of_seconds"] is unknown["largest_piece"]["share_of_seconds"] is None
    assert 0.2 < inner["share_by_reference_rates"] < 0.6
    command = ("check", "net.py:Picky", "--input", "3x4", "--kind", "h100")
    data = json.loads(placer(*command, "--json").stdout)
    (inner,) = data["whole_modules"]
    assert 0.2 < inner["share_of_seconds"] < 0.6
    assert inner["most_equal_stages"] == int(1 / inner["share_of_seconds"])
    assert data["largest_piece"]["layers"] == ["inner"]


def test_profile(placer: Run) -> None:
    result = placer("profile", "net.py:Net", *X, "--depth", "1", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    rows = {row["layer"]: row for row in data["layers"]}
    assert set(rows) == {"blocks", "head"}
    assert rows["blocks"]["parameters"] == 3 * 2 * (64 * 64 + 64) * 4
    assert rows["head"]["forward_flops"] == 2 * 8 * 64 * 2
    assert data["total"]["parameters"] == sum(row["parameters"] for row in rows.values())
    deep = placer("profile", "net.py:Net", *X)
    assert "blocks.2.b" in deep.stdout and "blocks.2 (itself)" in deep.stdout


def test_what_profile_measures_is_what_plan_reads(placer: Run, tmp_path: Path) -> None:
    """The profile applies to devices of the type that it was measured on."""
    file, on_cpu = tmp_path / "net-profile.json", tmp_path / "cpu.json"
    on_cpu.write_text('{"devices": ["cpu"], "optimizer": "sgd"}')
    result = placer("profile", "net.py:Net", *X, "--rounds", "2", "-o", str(file), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    nodes = sum(r["forward_seconds"] + r["backward_seconds"] for r in found["layers"])
    nodes += found["loss"]["forward_seconds"] + found["loss"]["backward_seconds"]
    result = placer("plan", "net.py:Net", str(on_cpu), *X, "--profile", str(file), "--json")
    (stage,) = json.loads(result.stdout)["stages"]
    assert stage["forward_seconds"] + stage["backward_seconds"] == pytest.approx(nodes, rel=1e-3)
    other = placer("plan", "net.py:Net", "fits.json", *X, "--profile", str(file))
    assert other.exit_code == 2
    assert "was measured on a 'cpu' device, and the spec has cuda:0, cuda:1" in other.stderr
    wide = placer("plan", "net.py:Net", str(on_cpu), *X, "-m", "depth=1", "--profile", str(file))
    assert f"--profile {file}: is the profile of another model" in wide.stderr.replace("\n", "")
    half = tmp_path / "half.json"
    half.write_text('{"devices": ["cpu"], "optimizer": "sgd", "precision": "bf16"}')
    half_planned = placer("plan", "net.py:Net", str(half), *X, "--profile", str(file))
    assert f"--profile {file}: was measured in fp32" in half_planned.stderr.replace("\n", "")


@pytest.fixture
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate with tiny operations, whose results say nothing about the machine."""
    monkeypatch.setattr("placer.profiling.calibration._CPU_SCALE", 1 / 64)


@pytest.mark.usefixtures("small_samples")
def test_calibrate_writes_a_kind(placer: Run, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    result = placer("calibrate", "--device", "cpu", "--seconds", "0.001", "-o", str(file), "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data == json.loads(file.read_text())
    assert data["name"] == "here"
    assert data["rates"]["product"]["float32"]["flops"] > 1e6
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"devices": [{"name": "cpu", "kind": str(file)}]}))
    assert placer("plan", "net.py:Net", str(spec), *X).exit_code == 0
    assert placer("calibrate", "-o", str(tmp_path / "here")).exit_code == 2
    assert "not on this machine" in placer("calibrate", "--device", "cuda:99").stderr
    assert "did you mean 'cuda:0'" in placer("calibrate", "--device", "cdua:0").stderr


def test_report(placer: Run, tmp_path: Path) -> None:
    saved, peaks, page = tmp_path / "p.json", tmp_path / "s.json", tmp_path / "r.html"
    placer("plan", "net.py:Net", "fits.json", *X, "-o", str(saved))
    simulated = placer("simulate", "net.py:Net", str(saved), *X, "--json")
    peaks.write_text(simulated.stdout, encoding="utf-8")
    result = placer("report", str(saved), "-o", str(page), "--simulation", str(peaks))
    assert result.exit_code == 0
    assert "Alive at the peak" in page.read_text(encoding="utf-8")
    bad = placer("report", str(saved), "-o", str(page), "--simulation", str(saved))
    assert bad.exit_code == 2
    assert "does not hold simulated peaks" in bad.stderr


def test_times_are_known_where_the_kind_is(placer: Run, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    plan = ("plan", "net.py:Net", "fits.json", *X)
    unknown = placer(*plan, "--trace", str(trace))
    assert unknown.exit_code == 2
    assert "a trace needs times, which are not known\n  -> give --kind" in unknown.stderr
    said = " ".join(unknown.stdout.split())
    assert "estimated step not known" in said and "bubble" not in said
    assert 'give --kind, or "kind" in the spec; nearest by memory: rtx3070 (7.57 GiB)' in said
    known = placer(*plan, "--trace", str(trace), "--kind", "H100", "--json")
    assert known.exit_code == 0 and json.loads(known.stdout)["step_seconds"] > 0
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == set("MXC")
    on_cpus = placer("plan", "net.py:Net", "tight.json", *X, "--kind", "h100")
    assert "error: --kind: the kinds of all devices in the spec are known" in on_cpus.stderr


def test_auto_asks_for_the_kind_where_it_must_choose_by_time(placer: Run) -> None:
    command = ("auto", "net.py:Net", *X, "-d", "cuda:0=12GiB", "-d", "cuda:1=12GiB")
    for options in ((), ("--microbatches", "auto")):
        asked = placer(*command, *options)
        assert asked.exit_code == 2
        assert "error: --kind: the kind of cuda:0, cuda:1 is not given" in asked.stderr
        assert "nearest by memory: rtx3060-12gb (11.63 GiB)" in asked.stderr
        assert placer(*command, *options, "--kind", "rtx3060-12gb").exit_code == 0
    assert placer(*command, "--objective", "devices").exit_code == 0  # which needs no times


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", [None, "rtx3090"])
def test_what_would_fit_has_a_time_and_headroom_the_fastest_first(
    placer: Run, kind: str | None, tmp_path: Path
) -> None:
    device = {"name": "cuda:0", "memory": "900MiB", **({"kind": kind} if kind else {})}
    (tmp_path / "spec.json").write_text(json.dumps({"devices": [device]}))
    spec = str(tmp_path / "spec.json")
    result = placer("plan", "net.py:Net", spec, "-i", "131072x64")
    assert result.exit_code == 3
    said = " ".join(result.stdout.partition("what would make it fit:")[2].split())
    fitting = said.count(" MiB headroom")
    assert fitting >= 3 and '"replicas": 2: another is on cuda:1, ' in said
    seconds = [float(each) for each in re.findall(r"([\d.]+) ms per step", said)]
    if kind:
        assert seconds == sorted(seconds) and len(seconds) == fitting
    else:
        assert not seconds and "in this order by reference rates" in said


COMMANDS = (
    *("auto", "fit", "plan", "check", "simulate", "verify", "schema", "report"),
    *("profile", "calibrate", "import", "export", "diff", "explain", "what-if"),
)


@pytest.mark.matrix(2)
@pytest.mark.usefixtures("small_samples")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_of_a_command_works(
    placer: Run, command: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(
        f"placer.cli.{command.replace('import', 'import_').replace('-', '_')}"
    )
    assert module.EXAMPLE in placer(command, "--help").stdout
    program, name, *arguments = shlex.split(module.EXAMPLE.partition(" > ")[0])
    assert (program, name) == ("placer", command)
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "net.py", tmp_path)
    shutil.copy(folder / "fits.json", tmp_path / "spec.json")
    if command in ("report", "explain", "export", "what-if"):
        placer("plan", "net.py:Net", "spec.json", *X, "-o", "plan.json")
    for name_of_other in ("before.json", "after.json"):
        shutil.copy(folder / "fits.json", tmp_path / name_of_other)
    (tmp_path / "device_map.json").write_text('{"blocks": 0, "head": 1}')
    assert placer(name, *arguments).exit_code == 0


def test_auto_tells_of_too_little_host_memory(placer: Run) -> None:
    options = ("--input", "4096x64", "-d", "cpu:0=5MiB", "--offload", "--no-checkpoint")
    options += ("--microbatches", "1", "--host-memory")
    assert placer("auto", "net.py:Net", *options, "5MiB").exit_code == 0
    result = placer("auto", "net.py:Net", *options, "4MiB")
    assert result.exit_code == 3
    assert "1.00 MiB" in result.stderr and 'give more "host_memory"' in result.stderr
    assert placer("auto", "net.py:Net", *options, "much").exit_code == 2


def test_a_host_with_too_little_memory_is_told(placer: Run, tmp_path: Path) -> None:
    spec = {"devices": ["cuda:0"], "offload": ["*"], "host_memory": 600}
    (tmp_path / "host.json").write_text(json.dumps(spec))
    for command in ("plan", "simulate"):
        result = placer(command, "net.py:Net", str(tmp_path / "host.json"), *X, "--json")
        assert result.exit_code == 3
        assert 'over its "host_memory"' in result.stderr
        data, _ = json.JSONDecoder().raw_decode(result.stdout)
        assert data["host"]["budget"] == 600
        assert command == "simulate" or data["fits"] is False
        assert "offloaded activations take" in result.stderr
