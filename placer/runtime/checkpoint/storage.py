"""Entries to and from a folder, by ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save as save_from

from placer.errors import PlacerError
from placer.runtime.checkpoint.entries import Entries


class _DataPlanner(DefaultLoadPlanner):
    """Reads plain values as data: unlike DCP's own planner it runs no code that a file names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)


def write_entries(entries: Entries, folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Write this process's entries into ``folder``; with the other ranks of ``group``.

    Of an entry that several ranks have, the lowest rank's is written.
    """
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    with _translated(folder, "cannot be written", "check the disk and save again"):
        writer = FileSystemWriter(folder)
        save_from(
            entries,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )


def read_table(folder: Path) -> Metadata:
    """What the checkpoint in ``folder`` holds: DCP's metadata, from entry name to shape and type."""
    with _translated(folder, "its table of contents cannot be read", "load another checkpoint"):
        metadata: Metadata = FileSystemReader(folder).read_metadata()
        return metadata


def read_entries(entries: Entries, folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Fill ``entries``: tensors in place, plain values by assignment."""
    remedy = "load another checkpoint; the module may hold a part of this one"
    with _translated(folder, "cannot be read", remedy):
        reader = FileSystemReader(folder)
        load_into(
            entries,
            storage_reader=reader,
            planner=_DataPlanner(),
            process_group=group,
            no_dist=group is None,
        )


def require_plain(value: Any, what: str) -> None:
    """Raise ``PlacerError`` unless ``value`` can be read back without running code."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise PlacerError(
            what,
            f"cannot be read back as data: {str(error).splitlines()[0]}",
            "save numbers, strings, tensors, and lists and dicts of them (state_dict() of a scheduler)",
        ) from error


@contextmanager
def _translated(folder: Path, problem: str, remedy: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # One process on purpose: DCP warns that it takes it for that.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        failures = [f"rank {r}: {_reason(e[0])}" for r, e in sorted(error.failures.items())]
        raise PlacerError(
            f"checkpoint {folder}", f"{problem} ({'; '.join(failures)})", remedy
        ) from error
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise PlacerError(
            f"checkpoint {folder}", f"{problem} ({_reason(error)})", remedy
        ) from error


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
