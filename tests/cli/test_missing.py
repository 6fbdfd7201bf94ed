"""Without any of the packages that placer needs: ``doctor`` lists them, everything else is one error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import placer
from placer.versions import RANGES

ROOT = Path(placer.__file__).parents[1]
CODE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from placer.__main__ import main; main()"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of placer by a Python that has only its own library."""
    command = [sys.executable, "-I", "-S", "-c", CODE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_doctor_lists_what_is_missing() -> None:
    ran = _run("doctor")
    assert (ran.returncode, ran.stderr) == (2, "")
    for each in RANGES:
        assert f"{each.package:12}  -             missing" in ran.stdout
        assert each.requirement in ran.stdout
    found = json.loads(_run("doctor", "--json").stdout)
    assert found["ok"] is False
    assert {p["package"] for p in found["packages"] if p["status"] == "missing"} == {
        each.package for each in RANGES
    }


def test_other_commands_are_one_error() -> None:
    ran = _run("plan", "net.py:Net", "spec.json")
    assert (ran.returncode, ran.stdout) == (2, "")
    first, remedy = ran.stderr.splitlines()
    assert first == "error: typer: is not installed, and placer needs it"
    assert "python -m pip install" in remedy and "'placer doctor'" in remedy
