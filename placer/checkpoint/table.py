"""A checkpoint's table of contents, a JSON file with the position and the checksum of each entry.

    {"format": "placer checkpoint", "version": 1,
     "entries": {"model/fc.weight": {"file": "__0_0.distcp", "offset": 0, "length": 1472,
                                     "crc32": 2774950530, "dtype": "float32", "shape": [4, 3]}, …},
     "crc32": 1193046}                                            of "entries"

Checksums detect damage. They are not a signature: anyone who can write to the folder can change weights.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from placer.errors import CheckpointError, first_few
from placer.jsonfile import JSONError, json_pointer, read_json

TABLE = "contents.json"
UNCHANGED = "load another checkpoint, or a good copy of this one; nothing was changed by this one"
_SHOWN = 4  # how many problems of a table an error lists
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_Size = Annotated[int, Field(ge=0, lt=2**63)]
_Checksum = Annotated[int, Field(ge=0, lt=2**32)]


class Record(BaseModel):
    """The position of an entry that ``torch.save`` wrote, with ``dtype`` and ``shape`` if it is a tensor.

    ``file`` must have the form that ``torch.distributed.checkpoint`` uses, so it cannot name a file
    outside the checkpoint's folder.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    file: str = Field(pattern=r"\A__[0-9]+_[0-9]+\.distcp\z")
    offset: _Size
    length: _Size
    crc32: _Checksum
    dtype: str | None = None
    shape: list[_Size] | None = None

    @model_validator(mode="after")
    def _check_tensor(self) -> Record:
        if self.dtype is None and self.shape is None:
            return self
        if self.shape is None or self.dtype not in _DTYPES:
            raise ValueError(f"a tensor cannot have dtype {self.dtype!r} and shape {self.shape}")
        if math.prod(self.shape) * _DTYPES[self.dtype].itemsize > self.length:
            raise ValueError(
                f"a {self.dtype} tensor of shape {self.shape} is longer than {self.length} bytes"
            )
        return self

    @property
    def is_tensor(self) -> bool:
        """Whether the entry is a tensor and not a plain value."""
        return self.dtype is not None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The data type of an entry that is a tensor."""
        assert self.dtype is not None
        return _DTYPES[self.dtype]


Table = Mapping[str, Record]


class _TableFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal["placer checkpoint"]
    version: Literal[1]
    entries: dict[str, Record]
    crc32: _Checksum


def write_table(table: Table, folder: Path) -> None:
    """Write ``table`` into ``folder``, atomically and synced to disk."""
    file = _TableFile(
        format="placer checkpoint", version=1, entries=dict(table), crc32=_checksum(table)
    )
    new = folder / f".{TABLE}.new"
    with new.open("w", encoding="utf-8") as stream:
        json.dump(file.model_dump(exclude_none=True), stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(folder / TABLE)


def read_table(folder: Path) -> Table:
    """The table of the checkpoint in ``folder``. Raises ``CheckpointError`` if it is damaged."""
    where = f"checkpoint {folder}, {TABLE}"
    try:
        data = read_json(folder / TABLE)
    except JSONError as error:
        raise CheckpointError(where, error.problem, UNCHANGED) from None
    try:
        file = _TableFile.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        lines = [f"{json_pointer(p['loc'], data)}: {p['msg']}" for p in problems]
        text = "\n    ".join(first_few(lines, _SHOWN))
        raise CheckpointError(where, f"is damaged:\n    {text}", UNCHANGED) from None
    if (found := _checksum(file.entries)) != file.crc32:
        raise CheckpointError(
            where,
            f"is damaged: its entries have the checksum {found}, {file.crc32} was saved",
            UNCHANGED,
        )
    return file.entries


def _checksum(table: Table) -> int:
    """The CRC-32 of the entries as JSON with sorted keys."""
    values = {name: record.model_dump() for name, record in table.items()}
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
