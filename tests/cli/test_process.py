"""The command as a process: quick to start, and entered in two ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_and_schema_import_no_torch() -> None:
    code = (
        "import sys\nfrom placer.cli.main import app\n"
        "for arguments in (['--help'], ['plan', '--help'], ['schema']):\n"
        "    app(arguments, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    result = _run("-c", code)
    assert result.returncode == 0, result.stderr
    for command in ("auto", "plan", "check", "simulate", "verify", "schema", "report", "profile"):
        assert command in result.stdout


def test_python_m_placer(tmp_path: Path) -> None:
    result = _run("-m", "placer", "report", str(tmp_path / "none.json"))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


@pytest.mark.parametrize("text", ["1x2:", "1x2:float32<3<4", "x:y:z", "a b=3"])
def test_odd_inputs_are_refused(text: str) -> None:
    from placer.cli.inputs import parse_input
    from placer.errors import PlacerError

    with pytest.raises(PlacerError):
        parse_input(text)
