"""``placer machine`` and ``placer fit``: what they show, measure and find."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placer.cli.machine import EXAMPLE
from placer.machine.machine import find_machine, shipped_machines
from placer.spec import load_spec

Run = Callable[..., Any]


def test_all_machines_are_listed_and_one_is_written(placer: Run, tmp_path: Path) -> None:
    listed = placer("machine")
    assert listed.exit_code == 0 and all(name in listed.stdout for name in shipped_machines())
    path = tmp_path / "two.json"
    assert placer("machine", "dgx-h100:2", "-o", str(path)).exit_code == 0
    assert find_machine(str(path)) == find_machine("dgx-h100:2")
    wrong = placer("machine", "dgx-h10")
    assert wrong.exit_code == 2 and "did you mean 'dgx-h100'" in wrong.stderr


@pytest.mark.matrix(0)
def test_links_between_two_processes_are_measured(placer: Run, tmp_path: Path) -> None:
    """By the example of the command's help."""
    assert EXAMPLE in placer("machine", "--help").stdout
    path = tmp_path / "here.json"
    options = shlex.split(EXAMPLE.replace("machine.json", str(path)))[1:]
    result = placer(*options, "--kind", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    found = find_machine(str(path))
    assert json.loads(result.stdout)["devices_per_node"] == found.devices == 2
    assert 1e6 < (found.inside.bus or 0) <= 1e12 and 1e6 < found.inside.send < 1e12
    assert found.inside.latency < 1
    spec = load_spec({"machine": str(path)})
    assert [device.name for device in spec.devices] == ["cpu:0", "cpu:1"]


def test_fit_finds_the_largest_batch(placer: Run, tmp_path: Path) -> None:
    """By hand: the largest batch that fits, and the next one that does not."""
    model = ("net.py:Net", "-m", "depth=1")
    fields = ("-d", "cpu:0=150KiB", "--checkpoint", "--microbatches", "1", "--optimizer", "sgd")
    result = placer("fit", *model, "--input", "{b}x64", "--multiple", "32", *fields, "--json")
    assert result.exit_code == 0, result.stderr
    tried = json.loads(result.stdout)["tried"]
    fits = [each["sizes"]["b"] for each in tried if each["fits"]]
    short = [each["sizes"]["b"] for each in tried if not each["fits"]]
    assert fits and min(short, default=0) == max(fits) + 32
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(json.loads(result.stdout)["spec"]))
    for batch, code in ((max(fits), 0), (min(short), 3)):
        assert placer("plan", *model, str(spec), "--input", f"{batch}x64").exit_code == code


def test_fit_says_what_it_does_and_where_it_stopped(
    placer: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("placer.cli.progress.Progress.doing", lambda _, what: said.append(what))
    loss = ("--loss", "mse_loss", "--target", "{b}x2", "--whole-batch")
    result = placer(
        "fit", "net.py:Net", "--input", "{b}x64", "--most", "2", "-d", "cpu:0=1GiB", *loss
    )
    assert result.exit_code == 0, result.stderr
    assert "no larger size was tried (--most 2)" in " ".join(result.stderr.split())
    assert said.count("recording") == 2 and "1 device, running a step without data" in said
    assert json.loads(result.stdout)["loss"] == {
        "function": "mse_loss", "target": "2x2", "whole_batch": True
    }  # fmt: skip


def test_fit_begins_with_the_given_sizes_however_large(placer: Run) -> None:
    options = ("--input", "{b}x64", "--like", "96", "-d", "cpu:0=1GiB", "--json")
    tried = json.loads(placer("fit", "net.py:Net", *options).stdout)["tried"]
    assert [each["sizes"]["b"] for each in tried] == [96, 192, 384, 768]


def test_fit_explains_what_it_needs(placer: Run) -> None:
    for arguments, problem in (
        (("--input", "8x64"), "no size in braces"),
        (("--input", "{b}x64", "--like", "2x3"), "--like 2x3"),
        (("--input", "{bx64"), "--input"),
        (("--input", "{b}x64", "--loss", "mse_loss", "--target", "{c}x2"), "no --input has"),
    ):
        result = placer("fit", "net.py:Net", *arguments, "-d", "cpu:0=1GiB")
        assert result.exit_code == 2 and problem in result.stderr
