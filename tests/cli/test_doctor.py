"""``placer doctor`` and ``--version``: what is installed, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import placer as package
from placer import _torch
from placer.cli import installed
from placer.versions import RANGES


def test_version(placer: Callable[..., Any]) -> None:
    result = placer("--version")
    assert result.exit_code == 0
    torch_release = torch.__version__.split("+")[0]
    assert result.stdout.startswith(f"placer {package.__version__} (torch {torch_release}")


def test_doctor_names_every_package_and_device(placer: Callable[..., Any]) -> None:
    result = placer("doctor")
    assert result.exit_code == 0
    for each in RANGES:
        assert each.package in result.stdout
    assert "gloo" in result.stdout
    assert "cpu" in result.stdout


def test_doctor_as_json(placer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_HIP_ALLOC_CONF": "garbage_collection_threshold:0.8",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    result = placer("doctor", "--json")
    found = json.loads(result.stdout)
    assert found["ok"] is True
    packages = {each["package"]: each for each in found["packages"]}
    assert packages["torch"]["release"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["devices"][0]["name"] == "cpu"
    assert found["devices"][0]["memory"] > found["devices"][0]["free"] > 0
    assert found["allocator"] == given
    assert found["backends"]["gloo"] is True


def test_doctor_says_what_torch_lacks(
    placer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = _torch._is_there
    lost = "torch.library._scoped_library"
    monkeypatch.setattr(_torch, "_is_there", lambda name: name != lost and there(name))
    result = placer("doctor", "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert (found["ok"], found["torch_lacks"]) == (False, [lost])
    assert f"torch has no {lost}" in placer("doctor").stdout


def test_doctor_works_without_torch(
    placer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch is not installed, or its libraries cannot be loaded."""
    monkeypatch.setattr(installed, "_import_torch", lambda: "OSError: libcudart.so.13: not found")
    result = placer("doctor")
    assert result.exit_code == 2
    assert "torch cannot be imported: OSError: libcudart.so.13" in result.stdout


@pytest.mark.parametrize("command", ["doctor", "doctor --json", "plan net.py:Net spec.json"])
def test_what_is_missing_is_said_where_nothing_is_installed(command: str) -> None:
    """In an environment that has none of our dependencies."""
    run = [sys.executable, "-S", "-m", "placer", *command.split()]  # -S: without site-packages
    root = Path(package.__file__).parents[1]
    done = subprocess.run(run, cwd=root, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    if "--json" in command:
        missing = [each["package"] for each in json.loads(done.stdout)["packages"][1:]]
        assert missing == [each.package for each in RANGES]
    else:
        said = done.stdout if command == "doctor" else done.stderr
        assert f"python -m pip install '{RANGES[0].requirement}'" in said
        assert "Traceback" not in done.stderr
