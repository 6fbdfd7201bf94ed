"""The package: its public names, for type checkers as at run time, and its wheel."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import placer
from placer.spec import schema_text

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    tree = ast.parse(Path(placer.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(homes) == placer.__all__
    for name, home in homes.items():
        assert placer._HOME_OF[name] == str(home).removeprefix("placer.")
        assert getattr(placer, name).__name__ == name


def test_a_wheel_has_every_file_of_the_package_and_runs(tmp_path: Path) -> None:
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "placer", source / "placer", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path))
    _python("pip", "wheel", str(source), *options, cwd=tmp_path)
    (wheel,) = tmp_path.glob("placer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    files = [
        {path.relative_to(folder) for path in (folder / "placer").rglob("*") if path.is_file()}
        for folder in (unpacked, source)
    ]
    assert files[0] == files[1]
    assert _python("placer", "schema", cwd=unpacked) == schema_text()


def _python(module: str, *arguments: str, cwd: Path) -> str:
    """What ``python -m module`` prints, run in ``cwd``, whose packages come first."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout
