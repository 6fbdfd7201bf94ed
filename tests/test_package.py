"""The package's public names are the same for type checkers as at run time."""

from __future__ import annotations

import ast
from pathlib import Path

import placer


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
