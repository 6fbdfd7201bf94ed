"""The command as a process: it starts quickly, and can be started in two ways."""

from __future__ import annotations

import json
import os
import signal
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


WRONG = [
    ("plan", "net.py:Net", "nothing.json", "--input", "8x64"),
    ("plan", "net.py:Net", "fits.json", "--input", "8y64"),
    ("plan", "net.py:Net", "fits.json", "--input", "8x64", "-m", "width"),
    ("plan", "net.py:Net", "fits.json", "--input", "8x64", "-o", "no/where.json"),
    ("profile", "net.py:Net"),
    ("auto", "net.py:Net", "--input", "8x64", "-d", "cda:0"),
    ("auto", "net.py:Net", "--input", "8x64", "-d", "cuda:0", "-o", "no/where.json"),
]


def test_what_is_wrong_with_options_is_told_before_torch_is_imported(folder: Path) -> None:
    code = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom placer.cli.main import app\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    result = CliRunner().invoke(app, arguments)\n"
        "    assert result.exit_code == 2, (arguments, result.output)\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(WRONG)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr


def test_the_shell_completes_commands_and_options() -> None:
    code = "from placer.cli.main import app; app(prog_name='placer')"

    def completed(words: str) -> list[str]:
        count = str(len(words.split(" ")) - 1)
        asked = {"_PLACER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | asked,
        )
        return result.stdout.split()

    assert completed("placer pl") == ["plan"]
    assert "--explain" in completed("placer plan --exp")
    # With this typer takes the shell's name as an argument instead of looking at its parent process.
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=named,
    )
    assert "_PLACER_COMPLETE=complete_bash" in script.stdout, script.stderr


def test_a_module_in_the_working_folder_is_the_one_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python would import it; a folder with the name of an installed package does not count."""
    from placer.errors import PlacerError
    from placer.importing import find_callable

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "wheel_of_time.py").write_text("class Net:\n    pass\n")
    (tmp_path / "networkx").mkdir()
    assert find_callable("wheel_of_time:Net").__module__ == "wheel_of_time"
    with pytest.raises(PlacerError, match=r"did you mean wheel_of_time:Net\?"):
        find_callable("wheel_of_time:Nett")
    with pytest.raises(PlacerError, match=r"did you mean wheel_of_time\?"):
        find_callable("wheel_of_tim:Net")
    find_callable("networkx:DiGraph")
    with pytest.raises(PlacerError, match=r"did you mean networkx\.generators\?"):
        find_callable("networkx.generator:path_graph")


def test_ctrl_c_ends_the_command_with_one_line(folder: Path) -> None:
    """Ctrl-C while torch is imported, which takes a while and is not placer's code."""
    command = [sys.executable, "-m", "placer", "plan", "net.py:Net", "fits.json", "--input", "8x64"]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
        # A shell's background job ignores it; so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert started.stderr is not None
    assert started.stderr.readline() == "importing torch and the model …\n"
    started.send_signal(signal.SIGINT)
    output, errors = started.communicate(timeout=60)
    assert (output, errors) == ("", "error: interrupted\n")
    assert started.returncode == 130


def test_ctrl_c_while_the_command_itself_is_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    result = subprocess.run(
        [sys.executable, "-m", "placer", "plan"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *map(str, sys.path)])},
    )
    assert (result.stdout, result.stderr) == ("", "error: interrupted\n")
    assert result.returncode == 130
