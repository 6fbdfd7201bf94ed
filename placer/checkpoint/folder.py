"""Replaces the folder of a checkpoint atomically: writes the new one next to it, then renames both.

    name            the checkpoint
    .name.saving    the next one, while it is being written
    .name.previous  the last one, between the two renames (or after a kill there)

A kill at any moment leaves a complete checkpoint as ``name`` or ``.name.previous``.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

from placer.checkpoint.table import TABLE
from placer.errors import CheckpointError, PlacerError, path_remedy

_DCP_TABLE = ".metadata"  # written by torch.distributed.checkpoint for its own readers


def saving_folder(path: Path) -> Path:
    """The folder where the next checkpoint of ``path`` is written."""
    return path.parent / f".{path.name}.saving"


def previous_folder(path: Path) -> Path:
    """The folder that has the last checkpoint of ``path`` while it is being replaced."""
    return path.parent / f".{path.name}.previous"


def begin(path: Path) -> Path:
    """Create an empty folder for the next checkpoint of ``path``, after cleaning up from a kill.

    Raises ``PlacerError`` if ``path`` exists and is not a checkpoint.
    """
    if path.exists() and not any((path / name).is_file() for name in (TABLE, _DCP_TABLE)):
        raise PlacerError(
            f"checkpoint {path}",
            "exists and is not a checkpoint, and saving would replace it",
            "save to another path",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() and previous_folder(path).exists():
        _move(previous_folder(path), path)
    _delete(saving_folder(path))
    saving_folder(path).mkdir()
    return saving_folder(path)


def _move(old: Path, new: Path) -> None:
    old.rename(new)
    _sync(new.parent)


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def commit(path: Path) -> None:
    """Replace the checkpoint at ``path`` by the one that was written; deletes the old one last."""
    _sync(saving_folder(path))
    if path.exists():
        _delete(previous_folder(path))
        _move(path, previous_folder(path))
    _move(saving_folder(path), path)
    _delete(previous_folder(path))


def _sync(folder: Path) -> None:
    """Sync the folder's entries to disk; files are synced when they are written."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exists(path: Path) -> bool:
    """Whether ``path`` exists, or the last checkpoint is next to it after a kill."""
    return path.exists() or (previous_folder(path) / TABLE).is_file()


def find(path: Path) -> Path:
    """The folder with the complete checkpoint of ``path``. Raises ``CheckpointError`` if there is none."""
    folder = path if path.exists() else previous_folder(path)
    if (folder / TABLE).is_file():
        return folder
    where = f"checkpoint {path}"
    if (folder / _DCP_TABLE).is_file():
        raise CheckpointError(
            where,
            f"has no {TABLE} with its checksums",
            "load another checkpoint; if you trust this one, torch.distributed.checkpoint can read it",
        )
    problem = "is not a checkpoint of placer.save" if path.exists() else "no such checkpoint"
    raise CheckpointError(
        where, problem, path_remedy(path, lambda beside: (beside / TABLE).is_file())
    )


def require_shared(folder: Path) -> None:
    """Raise ``PlacerError`` if this process cannot see the folder that rank 0 has created.

    Waits up to ten seconds, because a network file system may show it late.
    """
    end = time.monotonic() + 10.0
    while not folder.is_dir():
        if time.monotonic() > end:
            raise PlacerError(
                f"checkpoint {folder.parent}",
                f"the folder that rank 0 created does not exist on host {socket.gethostname()}",
                "save to a file system that all hosts share",
            )
        time.sleep(0.1)
