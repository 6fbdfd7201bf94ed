"""Install the checkout and what it needs into the environment of the Python that runs this.

    python .ci/install.py EXTRA [EXTRA …]

The releases are those of ``requirements.lock`` (`make lock` writes it). Where the package registry
does not offer one of them, or the machine's pip configuration forbids it, torch and what torch
brings come from the ranges of ``pyproject.toml``; if that fails too, everything does. What was taken
instead of a locked release is printed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
# Torch, and the packages whose releases torch fixes itself.
TORCH = re.compile(r"torch|torchvision|triton|cuda-.*|nvidia-.*")


def main(extras: list[str]) -> int:
    """Returns pip's exit code of the last attempt."""
    checkout = f"{ROOT}[{','.join(extras)}]"
    print("installing the releases of requirements.lock", flush=True)
    if _pip("-r", str(LOCK), "-e", checkout) == 0:
        return 0
    print("they cannot be had here: torch comes from the range of pyproject.toml", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        lines = LOCK.read_text(encoding="utf-8").splitlines(keepends=True)
        file.writelines(line for line in lines if not TORCH.fullmatch(line.partition("==")[0]))
        file.flush()
        code = _pip("-e", checkout, "-c", file.name)
    if code != 0:
        print("nor the others: everything comes from the ranges of pyproject.toml", flush=True)
        code = _pip("-e", checkout)
    if code == 0:
        print(f"instead of requirements.lock: {', '.join(_differences()) or 'nothing'}", flush=True)
    return code


def _pip(*arguments: str) -> int:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    # setuptools warns of every editable installation, which pip shows even when it is quiet.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, check=False, env=environment).returncode


def _differences() -> list[str]:
    """``"torch 2.14.1 (locked: 2.15.0)"`` for every package that is here in another release."""
    from packaging.requirements import Requirement  # installed by now

    found = []
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        locked = Requirement(line)
        if locked.marker is not None and not locked.marker.evaluate():
            continue
        try:
            release = importlib.metadata.version(locked.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another release of torch
        if not locked.specifier.contains(release, prereleases=True):
            found.append(f"{locked.name} {release} (locked: {str(locked.specifier)[2:]})")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
