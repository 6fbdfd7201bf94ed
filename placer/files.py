"""The errors for files that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from placer.errors import PlacerError


def check_writable(*paths: Path | None) -> None:
    """Raise ``PlacerError`` if a file certainly cannot be written; None stands for no file.

    To be called before work that takes a while; `writing` reports all other failures.
    """
    for path in paths:
        if path is None:
            continue
        folder = path.parent
        reason = ""
        if not folder.is_dir():
            reason = f"there is no folder {folder}"
        elif path.is_dir():
            reason = "it is a folder"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            reason = "Permission denied"
        if reason:
            raise PlacerError(str(path), f"cannot be written: {reason}", "check the path")


def check_spec_path(path: Path | None) -> None:
    """Raise ``PlacerError`` if a spec cannot be written to ``path``, or would not be read from it again."""
    check_writable(path)
    if path is not None and path.suffix.lower() == ".toml":
        raise PlacerError(
            str(path),
            "cannot be written: specs are written as JSON, and a .toml file is read as TOML",
            f"write {path.with_suffix('.json')}",
        )


@contextmanager
def writing(path: Path, error: type[PlacerError] = PlacerError) -> Iterator[None]:
    """Raise ``error`` about ``path`` if this block, which writes the file, fails with an ``OSError``."""
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise error(str(path), f"cannot be written: {reason}", "check the folder") from failure
