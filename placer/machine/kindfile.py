"""Reads and writes device kind files: measured memory, rates and bandwidths of a type of device.

``placer calibrate`` and ``placer profile`` write them. A spec may name one in place of a kind of the
catalogue: ``{"name": "cuda:0", "kind": "my-gpu.json"}``. A file written by ``placer profile`` also has the
measured seconds of every node of one model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placer.errors import nearest
from placer.files import writing
from placer.jsonfile import JSONError, json_pointer, read_json
from placer.machine.catalogue import CATALOGUE, DeviceKind, Profile
from placer.machine.rates import CLASSES, DTYPES, Rate, Rates

SUFFIX = ".json"


class _KindFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    placer_kind: Literal[1]  # version of the format
    name: str
    device: str  # what was measured
    device_type: str
    torch: str
    measured: str  # date
    memory: int | None = None
    context: int = Field(ge=0)
    link_bandwidth: float = Field(gt=0)
    host_bandwidth: float = Field(gt=0)
    rates: dict[str, dict[str, Rate]]  # class -> data type -> rate
    profile: Profile | None = None


def is_kind_file(name: str) -> bool:
    """Whether a spec's ``kind`` names a file rather than an entry of the catalogue."""
    return name.lower().endswith(SUFFIX)


def find_kind(name: str) -> DeviceKind:
    """The kind with this name in the catalogue, or the kind that the file with this name describes.

    Raises ``PlacerError``, with a JSON pointer, if the file is not a device kind.
    """
    if not is_kind_file(name):
        return CATALOGUE[name]
    try:
        state = Path(name).stat()
    except OSError:
        return _read(name, 0, 0)  # raises an error that says why
    return _read(name, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=32)
def _read(name: str, _changed: int, _size: int) -> DeviceKind:
    return _kind(load_kind_file(Path(name)))


def load_kind_file(path: Path) -> _KindFile:
    """The content of the file. Raises ``PlacerError`` if it is not a valid device kind."""
    data = read_json(path)
    if not isinstance(data, Mapping) or "placer_kind" not in data:
        raise JSONError(
            str(path),
            "is not a device kind file",
            "write one with 'placer calibrate' or 'placer profile'",
        )
    try:
        found = _KindFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = json_pointer(first["loc"], data)
        missing = first["loc"][-1] if first["type"] == "missing" else ""
        problem = f"{where}: {missing} is missing" if missing else f"{where}: {first['msg']}"
        raise JSONError(str(path), problem, "measure again; placer writes the file") from None
    _check_rates(path, found)
    return found


def _check_rates(path: Path, found: _KindFile) -> None:
    for name in CLASSES:
        for dtype in DTYPES:
            if dtype not in found.rates.get(name, {}):
                problem = f"/rates/{name}/{dtype} is missing"
                raise JSONError(str(path), problem, "measure again with this version of placer")
    for name in found.rates:
        if name not in CLASSES:
            near = nearest(name, CLASSES)
            hint = f"did you mean {near!r}?" if near else "measure again"
            raise JSONError(str(path), f"/rates/{name} is not a class of operations", hint)


def _kind(found: _KindFile) -> DeviceKind:
    return DeviceKind(
        name=found.name,
        device_type=found.device_type,
        memory=found.memory,
        rates=Rates(
            {
                (name, dtype): rate
                for name, row in found.rates.items()
                for dtype, rate in row.items()
            }
        ),
        link_bandwidth=found.link_bandwidth,
        host_bandwidth=found.host_bandwidth,
        context=found.context,
        profile=found.profile,
    )


def kind_to_json(
    kind: DeviceKind, *, device: str, device_type: str, torch: str, measured: str
) -> dict[str, Any]:
    """The content of a file for ``kind``; the other arguments say what was measured and when."""
    rates: dict[str, dict[str, Rate]] = {}
    for (name, dtype), rate in kind.rates.table.items():
        rates.setdefault(name, {})[dtype] = rate
    file = _KindFile(
        placer_kind=1,
        name=kind.name,
        device=device,
        device_type=device_type,
        torch=torch,
        measured=measured,
        memory=kind.memory,
        context=kind.context,
        link_bandwidth=kind.link_bandwidth,
        host_bandwidth=kind.host_bandwidth,
        rates=rates,
        profile=kind.profile,
    )
    values: dict[str, Any] = _short(file.model_dump(mode="json", exclude_defaults=True))
    return values


def save_kind(values: Mapping[str, Any], path: Path) -> None:
    """Write the result of `kind_to_json`. Raises ``PlacerError`` if the file cannot be written."""
    with writing(path):
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _short(value: Any) -> Any:
    """JSON values with numbers of at most 6 digits, which is more than is measured."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
