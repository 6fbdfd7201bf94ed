"""Reads and writes device kind files: measured memory, rates and bandwidths of a type of device.

``placer calibrate`` and ``placer profile`` write them. A spec may name one in place of a kind of the
catalogue: ``{"name": "cuda:0", "kind": "my-gpu.json"}``. A file written by ``placer profile`` also has the
measured seconds of every node of one model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placer.catalogue import CATALOGUE, DeviceKind, PeakMemory, Profile
from placer.errors import nearest
from placer.files import writing
from placer.jsonfile import JSONError, json_pointer, read_json
from placer.rates import CLASSES, DTYPES, RATE_FIELDS, Rate, Rates

SUFFIX = ".json"
_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
_Number = Field(ge=0)
_Pass = dict[str, tuple[float, float]]  # node -> seconds measured, seconds estimated


class _RateFile(BaseModel):
    model_config = _STRICT

    overhead: float = _Number
    flops: float = _Number
    bandwidth: float = _Number
    row_bandwidth: float = _Number
    tile: int = Field(default=1, ge=1)
    launch: float = _Number


class _MemoryFile(BaseModel):
    model_config = _STRICT

    allocated: int = Field(ge=0)
    reserved: int = Field(ge=0)


class _ProfileFile(BaseModel):
    model_config = _STRICT

    fingerprint: str
    precision: Literal["fp32", "bf16", "fp16"]
    inputs: list[str]
    forward: _Pass
    backward: _Pass
    # Seconds in which the host launches each node. Left out for a CPU; older files of GPUs lack them.
    forward_launch: dict[str, float] = {}
    backward_launch: dict[str, float] = {}
    memory: _MemoryFile | None = None  # of a GPU; older files lack it


class _KindFile(BaseModel):
    model_config = _STRICT

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
    rates: dict[str, dict[str, _RateFile]]  # class -> data type -> rate
    profile: _ProfileFile | None = None


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
    profile = None
    if (p := found.profile) is not None:
        profile = Profile(
            fingerprint=p.fingerprint,
            precision=p.precision,
            passes=(p.forward, p.backward),
            launches=(p.forward_launch, p.backward_launch),
            memory=None if p.memory is None else PeakMemory(**p.memory.model_dump()),
        )
    return DeviceKind(
        name=found.name,
        device_type=found.device_type,
        memory=found.memory,
        rates=Rates(
            {
                (name, dtype): Rate(**rate.model_dump())
                for name, row in found.rates.items()
                for dtype, rate in row.items()
            }
        ),
        link_bandwidth=found.link_bandwidth,
        host_bandwidth=found.host_bandwidth,
        context=found.context,
        profile=profile,
    )


def kind_to_json(
    kind: DeviceKind,
    *,
    device: str,
    device_type: str,
    torch: str,
    measured: str,
    inputs: list[str] | None = None,
) -> dict[str, Any]:
    """The content of a file for ``kind``; the other arguments say what was measured and when."""
    rates: dict[str, dict[str, Any]] = {}
    for (name, dtype), rate in kind.rates.table.items():
        rates.setdefault(name, {})[dtype] = {
            field: _short(getattr(rate, field)) for field in RATE_FIELDS
        }
    profile: dict[str, Any] | None = None
    if (p := kind.profile) is not None:
        profile = {
            "fingerprint": p.fingerprint,
            "precision": p.precision,
            "inputs": inputs or [],
            "forward": {k: [_short(s), _short(e)] for k, (s, e) in p.passes[0].items()},
            "backward": {k: [_short(s), _short(e)] for k, (s, e) in p.passes[1].items()},
        }
        for key, launched in zip(("forward_launch", "backward_launch"), p.launches, strict=True):
            if launched:
                profile[key] = {name: _short(seconds) for name, seconds in launched.items()}
        if p.memory is not None:
            profile["memory"] = asdict(p.memory)
    return {
        "placer_kind": 1,
        "name": kind.name,
        "device": device,
        "device_type": device_type,
        "torch": torch,
        "measured": measured,
        "memory": kind.memory,
        "context": kind.context,
        "link_bandwidth": _short(kind.link_bandwidth),
        "host_bandwidth": _short(kind.host_bandwidth),
        "rates": rates,
        "profile": profile,
    }


def save_kind(values: Mapping[str, Any], path: Path) -> None:
    """Write the result of `kind_to_json`. Raises ``PlacerError`` if the file cannot be written."""
    with writing(path):
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _short(value: float) -> float | int:
    return value if isinstance(value, int) else float(f"{value:.6g}")
