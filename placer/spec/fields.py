"""The types of a spec's fields: how each is read from JSON, checked, and described in the schema."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema

from placer.errors import PlacerError, nearest
from placer.jsonfile import spell
from placer.machine.catalogue import CATALOGUE
from placer.machine.kindfile import is_kind_file
from placer.machine.machine import find_machine
from placer.quantities import parse_bytes
from placer.state_layout import ShardState

ScheduleName = Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")
DEVICE_TYPES = ("cuda", "cpu", "xpu", "mps", "hpu")

_DEVICE = re.compile(r"([a-z]+)(?::(0|[1-9]\d{0,5}))?")
_MISSPELT_DEVICE = re.compile(r"\s*([a-z]+)[^a-z0-9]*(\d{0,6})\s*", re.IGNORECASE)
_ALIASES = {"gpu": "cuda", "nvidia": "cuda", "hip": "cuda", "rocm": "cuda"}
MOST = 2**16  # replicas or micro-batches; a larger number must be a typo
_LEAST_MEMORY = 512  # bytes of a device; a smaller number was meant in GiB


def device_name(value: Any) -> str:
    """``value`` as a device name with an index: ``cuda`` becomes ``cuda:0``; ``cpu`` stays ``cpu``.

    Raises ``ValueError`` for anything that is not a device name.

    >>> device_name("cuda"), device_name("cuda:3"), device_name("cpu")
    ('cuda:0', 'cuda:3', 'cpu')
    """
    match = _DEVICE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[1] not in DEVICE_TYPES:
        near = nearest_device(value)
        hint = f"did you mean {near!r}?" if near else "write a name such as 'cuda:0' or 'cpu'"
        name, equals, memory = str(value).partition("=")
        if equals and _DEVICE.fullmatch(name):  # as --device has it
            hint = f'write {{"name": "{name}", "memory": "{memory}"}}'
        raise ValueError(
            f"{spell(value)} is not a device; {hint} (types: {', '.join(DEVICE_TYPES)})"
        )
    if match[2] is None and match[1] != "cpu":
        return f"{match[1]}:0"
    return str(value)


def nearest_device(name: Any) -> str | None:
    """The device that was probably meant, such as ``cuda:0`` for ``GPU:0`` or ``cuda0``; or None."""
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return f"cuda:{name}"
    match = _MISSPELT_DEVICE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    kind = match[1].lower()
    kind = _ALIASES.get(kind) or nearest(kind, DEVICE_TYPES) or ""
    return (f"{kind}:{int(match[2])}" if match[2] else kind) if kind else None


def device_kind_name(value: Any) -> str:
    """``value`` as the catalogue spells it (case does not matter), or the name of a file.

    Raises ``ValueError`` if it is neither.

    >>> device_kind_name("H100"), device_kind_name("my-gpu.json")
    ('h100', 'my-gpu.json')
    """
    if isinstance(value, str) and is_kind_file(value):
        return value  # the file is read when a plan is made
    if not isinstance(value, str) or value.lower() not in CATALOGUE:
        near = _nearest_kind(str(value).lower().replace(" ", ""))
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(
            f"{value!r} is not a device kind in the catalogue; {hint}known are {', '.join(CATALOGUE)}; "
            "or name a file that 'placer calibrate' wrote, or leave the kind out and give the memory"
        )
    return value.lower()


def _nearest_kind(name: str) -> str | None:
    """The kind whose name has ``name`` in it, as rtx3060-12gb has 3060, or is in ``name``.

    Otherwise the most similar.
    """
    longer = [kind for kind in CATALOGUE if name and name in kind]
    shorter = [kind for kind in CATALOGUE if kind in name]
    return min(longer, key=len, default=max(shorter, key=len, default=nearest(name, CATALOGUE)))


def _machine_name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"{value!r} is not the name of a machine; write 'dgx-a100', or a JSON file"
        )
    try:
        find_machine(value)
    except PlacerError as error:
        raise ValueError(f"{error.where} {error.problem}; {error.remedy}") from None
    return value


def _size(value: Any) -> int:
    if not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a size; write bytes, or text such as '16GiB'")
    return parse_bytes(value)


def device_memory(value: Any) -> int:
    """The bytes of a device that ``value`` stands for, such as '16GiB'.

    Raises ``ValueError`` if it is not a size, or so small that a unit must be missing.
    """
    nbytes = _size(value)
    if nbytes < _LEAST_MEMORY:
        meant = f"did you mean '{nbytes}GiB'?" if nbytes else "write text such as '16GiB'"
        raise ValueError(f"{nbytes} bytes are less than any device has; {meant}")
    return nbytes


def _count(value: Any) -> int | str:
    if value == "auto" and isinstance(value, str):
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        wanted = "a whole number from 1 up, or 'auto'"
        if isinstance(value, str) and value.isdecimal():
            wanted = f"{value} without quotes"
        raise ValueError(f"{spell(value)} is not a count; write {wanted}")
    if value > MOST:
        raise ValueError(f"more than {MOST} were found; write a smaller number, or 'auto'")
    return value


def _patterns(value: Any) -> tuple[str, ...] | str:
    if value == "auto" and isinstance(value, str):
        return "auto"
    if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
        example = [value if isinstance(value, str) and value else "encoder.*"]
        hint = f"write {json.dumps(example)} or 'auto'"
        raise ValueError(f"{spell(value)} is not a list of layer patterns; {hint}")
    return tuple(value)


def _shard_state(value: Any) -> Any:
    if isinstance(value, str) and value == "parameters":
        raise ValueError(
            "'parameters' is not possible yet (torch's fully_shard is wrong where a schedule splits "
            "backwards, and hangs where a replica has no rows); write 'gradients' to divide gradients and "
            "the optimizer's state over replicas, 'optimizer', 'none', or 'auto'"
        )
    return value


def _schedule(value: Any) -> Any:
    """The name of the schedule in torch's spelling; the case of ``value`` does not matter."""
    known = {name.lower(): name for name in SCHEDULES}
    return known.get(value.lower(), value) if isinstance(value, str) else value


_NAME_SCHEMA = {
    "type": "string",
    "pattern": "^[a-z]+(:(0|[1-9][0-9]{0,5}))?$",
    "examples": ["cuda:0", "cpu"],
}
_SIZE_TEXT = {"type": "string", "pattern": "^\\s*[0-9]+(\\.[0-9]+)?\\s*[kKmMgGtT]?[iI]?[bB]?\\s*$"}
_SIZES = ["16GiB", "500 MB"]
_SIZE_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, _SIZE_TEXT], "examples": _SIZES}
_MEMORY_SCHEMA = {
    "anyOf": [{"type": "integer", "minimum": _LEAST_MEMORY}, _SIZE_TEXT],
    "examples": _SIZES,
}
_COUNT_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST}, {"const": "auto"}]}
_PATTERNS_SCHEMA = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"const": "auto"}]}

DeviceName = Annotated[str, PlainValidator(device_name), WithJsonSchema(_NAME_SCHEMA)]
KindName = Annotated[
    str,
    PlainValidator(device_kind_name),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(CATALOGUE)},
                {"type": "string", "pattern": "\\.[jJ][sS][oO][nN]$"},
            ]
        }
    ),
]
MachineName = Annotated[
    str,
    PlainValidator(_machine_name),
    WithJsonSchema({"type": "string", "examples": ["dgx-a100", "dgx-h100:4", "machine.json"]}),
]
DeviceMemory = Annotated[int, PlainValidator(device_memory), WithJsonSchema(_MEMORY_SCHEMA)]
ByteSize = Annotated[int, PlainValidator(_size), WithJsonSchema(_SIZE_SCHEMA)]
Count = Annotated[int | Literal["auto"], PlainValidator(_count), WithJsonSchema(_COUNT_SCHEMA)]
Patterns = Annotated[
    tuple[str, ...] | Literal["auto"],
    PlainValidator(_patterns),
    PlainSerializer(lambda value: value if isinstance(value, str) else list(value)),
    WithJsonSchema(_PATTERNS_SCHEMA),
]
AllocatorName = Literal["default", "expandable"]
BatchNormMode = Literal["per_microbatch", "deferred", "sync"]
StoredRule = Literal["mean", "sum", "concatenate"]
Objective = Literal["throughput", "memory", "latency", "bottleneck", "devices"]
Precision = Literal["fp32", "bf16", "fp16"]
ShardStateField = Annotated[ShardState | Literal["auto"], BeforeValidator(_shard_state)]
ScheduleField = Annotated[ScheduleName | Literal["auto"], BeforeValidator(_schedule)]
