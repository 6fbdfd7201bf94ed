"""The site of the docs: it builds without a warning, and its reference has every name and field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pages
import pytest

import placer
from placer import PlacementSpec

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")


def test_the_site_builds_strictly_and_has_every_public_name_and_field(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for name in placer.__all__:
        assert f'id="placer.{placer._HOME_OF[name]}.{name}"' in api, name
    fields = (tmp_path / "fields.html").read_text(encoding="utf-8")
    for name in PlacementSpec.known_keys():
        assert f'<code>{name}</code><a class="headerlink"' in fields, name
