"""Rows are kept when a run is cut off, errors are rows, and a resumed run measures what is left."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fresh
from benchmarks.fresh import Job, Report

REPORT = Report(
    module="made.up",
    page="page",
    title="Title",
    command="command",
    lines=lambda rows: [f"rows: {[row['n'] for row in rows]}", ""],
)
JOBS = [Job(key=str(n), values={"n": n}, allocator="default") for n in range(3)]


def _given(folder: Path, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    fresh.add_options(parser)
    return parser.parse_args(["--device", "cpu", "--output", str(folder), *options])


def _answers(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Any]) -> list[Any]:
    """The processes answer in turn: an int is an exit code, an exception is raised; returns the calls."""
    left, calls = list(answers), []

    def run(command: list[str], *, env: dict[str, str], timeout: float, **_: Any) -> Any:
        calls.append((json.loads(command[-1]), env, timeout))
        found = left.pop(0)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, int):
            return subprocess.CompletedProcess(command, found, "", "Traceback\nValueError: bad\n")
        return subprocess.CompletedProcess(command, 0, f"noise\n{json.dumps(found)}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_an_error_is_a_row_and_a_resumed_run_measures_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh.versions()  # asks nvidia-smi by `subprocess.run` where there is a GPU
    _answers(monkeypatch, [{"a": 1}, 1, {"a": 3}])
    fresh.measure_all(REPORT, lambda _: JOBS, _given(tmp_path))
    page = (tmp_path / "page.md").read_text()
    assert "rows: [0, 2]" in page
    assert "- 1: exit code 1: ValueError: bad" in page
    calls = _answers(monkeypatch, [{"a": 2}])
    rows = fresh.measure_all(REPORT, lambda _: JOBS, _given(tmp_path, "--resume"))
    assert [values["n"] for values, *_ in calls] == [1]
    assert [row["a"] for row in rows] == [1, 2, 3]
    assert "Not measured" not in (tmp_path / "page.md").read_text()
    calls = _answers(monkeypatch, [{"a": 9}] * 3)  # without --resume: all of them anew
    assert [r["a"] for r in fresh.measure_all(REPORT, lambda _: JOBS, _given(tmp_path))] == [9] * 3


def test_what_there_is_when_a_run_is_cut_off_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _answers(monkeypatch, [{"a": 1}, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        fresh.measure_all(REPORT, lambda _: JOBS, _given(tmp_path))
    assert "rows: [0]" in (tmp_path / "page.md").read_text()
    assert list(json.loads((tmp_path / "page.json").read_text())["rows"]) == ["0"]


def test_a_job_has_its_allocator_whatever_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    calls = _answers(monkeypatch, [{}])
    fresh.run_job("made.up", JOBS[0], seconds=1)
    (values, environment, _), *_ = calls
    assert values == {"n": 0, "allocator": "default"}
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert "PYTORCH_ALLOC_CONF" not in environment
