"""Writes entries to a folder with ``torch.distributed.checkpoint`` (DCP), and reads and verifies them.

DCP writes every entry with ``torch.save``, one after the other, into a file per rank. DCP's reader is not
used, because it reads a pickle (``.metadata``) and copies tensors into the module before all are verified.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_from
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from placer.checkpoint.entries import Entries, entry_name
from placer.checkpoint.table import UNCHANGED, Record, Table
from placer.errors import CheckpointError, PlacerError, first_few

_SHOWN = 8  # how many damaged entries an error lists


class _DamageError(Exception):
    """The bytes of an entry are damaged; the message says how."""


class _Writer(FileSystemWriter):
    """DCP's writer, which keeps the position of each entry in ``places``.

    It copies nothing ahead of writing: DCP waits for such copies on one device only, and would write
    tensors of the other devices before they have been copied.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = super().write_data(plan, planner)
        self.places = {result.index.fqn: result.storage_data for result in future.wait()}
        return future


def write_entries(
    entries: Entries, folder: Path, *, group: dist.ProcessGroup | None
) -> tuple[Metadata, Mapping[str, Any]]:
    """Write this process's entries into ``folder``, together with the other ranks of ``group``.

    If several ranks have the same entry, the lowest rank's is written. Returns DCP's metadata of all
    entries, and the positions of those that this process has written.
    """
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    with _translated(folder, "cannot be written", "check the disk and save again"):
        writer = _Writer(folder)
        metadata: Metadata = save_from(
            entries,
            storage_writer=writer,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
        return metadata, writer.places


def record_entries(metadata: Metadata, places: Mapping[str, Any], folder: Path) -> Table:
    """The table of the entries at ``places``, with the checksums of their bytes in ``folder``.

    The bytes are read back, normally from the page cache.
    """
    table: dict[str, Record] = {}
    for name, place in places.items():
        saved = metadata.state_dict_metadata[name]
        tensor = saved if isinstance(saved, TensorStorageMetadata) else None
        if tensor is not None and len(tensor.chunks) != 1:
            raise CheckpointError(
                f"checkpoint {folder}",
                f"{entry_name(name)} is a distributed tensor, in {len(tensor.chunks)} parts",
                "save it with torch.distributed.checkpoint, or save its full_tensor()",
            )
        record = Record(
            file=place.relative_path,
            offset=place.offset,
            length=place.length,
            crc32=0,
            dtype=None if tensor is None else str(tensor.properties.dtype).removeprefix("torch."),
            shape=None if tensor is None else list(tensor.size),
        )
        try:
            checksum = zlib.crc32(_read_bytes(record, folder))
        except _DamageError as error:
            where = f"checkpoint {folder}, {place.relative_path}, {entry_name(name)}"
            raise CheckpointError(where, str(error), "check the disk and save again") from error
        table[name] = record.model_copy(update={"crc32": checksum})
    return table


def read_entries(names: Iterable[str], table: Table, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each entry, one at a time, on the CPU.

    Skips damaged entries, and at the end raises one ``CheckpointError`` about all of them.
    """
    problems = []
    for name in names:
        try:
            yield name, _read_value(table[name], folder)
        except (_DamageError, OSError) as error:
            problems.append(f"{table[name].file}, {entry_name(name)}: {error}")
    if problems:
        text = "\n    ".join(first_few(problems, _SHOWN))
        raise CheckpointError(f"checkpoint {folder}", f"is damaged:\n    {text}", UNCHANGED)


def _read_value(record: Record, folder: Path) -> Any:
    data = _read_bytes(record, folder)
    if (found := zlib.crc32(data)) != record.crc32:
        raise _DamageError(
            f"bytes {record.offset} to {record.offset + record.length} have the checksum {found}, "
            f"{record.crc32} was saved"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is refused here anyway
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch says to allow code, which is no advice here
        raise _DamageError("is not plain data: reading it could run code") from error
    except Exception as error:
        # Torch can raise anything here: the checksum is right, so somebody wrote these bytes on purpose.
        raise _DamageError(f"cannot be read ({_reason(error)})") from error
    found_type = _show_type(value)
    wanted = f"a {record.dtype} tensor of shape {tuple(record.shape or ())}"
    if record.is_tensor and found_type != wanted:
        raise _DamageError(f"is {found_type}, the table of contents says {wanted}")
    return value


def _read_bytes(record: Record, folder: Path) -> bytes:
    path = folder / record.file
    if not path.is_file():
        raise _DamageError("there is no such file")
    end = record.offset + record.length
    if (size := path.stat().st_size) < end:
        raise _DamageError(f"the file ends at byte {size}, this entry at byte {end}")
    with path.open("rb") as file:
        file.seek(record.offset)
        return file.read(record.length)


def _show_type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


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
            # DCP warns that it assumes a single process, which is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        failures = [f"rank {r}: {_reason(e[0])}" for r, e in sorted(error.failures.items())]
        raise CheckpointError(
            f"checkpoint {folder}", f"{problem} ({'; '.join(failures)})", remedy
        ) from error
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(
            f"checkpoint {folder}", f"{problem} ({_reason(error)})", remedy
        ) from error


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
