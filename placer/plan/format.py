"""The plan file: its shape in JSON, as strict pydantic models, and what is wrong with a bad one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placer.errors import PlanError, nearest
from placer.jsonfile import escape_token, json_pointer
from placer.spec.fields import MOST, OPTIMIZERS, device_name

VERSION = 1

_JSON_WORDS = {
    "a valid list": "a list",
    "a valid dictionary": "an object",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
}
_MOST_PROBLEMS = 20

Bytes = Annotated[int, Field(ge=0, le=2**63 - 1)]  # torch counts them in an int64
Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Seconds = Annotated[float, Field(ge=0)]


class _File(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True
    )


class MemoryFile(_File):
    """`StageMemory`, in bytes."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: Bytes
    saved: Bytes
    boundary: Bytes
    transient: Bytes
    peak: Bytes


class RegionFile(_File):
    """`placer.regions.Region`."""

    first: str
    last: str
    recompute: bool
    offload: bool


class StageFile(_File):
    """`StagePlan`."""

    index: Index
    devices: list[str]
    layers: list[str]
    nodes: list[str]
    memory: MemoryFile
    budget: Bytes | None
    reserve: Bytes
    forward_seconds: Seconds
    backward_seconds: Seconds
    regions: list[RegionFile] = []


class TransferFile(_File):
    """`Transfer`, with the words of the JSON."""

    value: str
    source: Index = Field(alias="from")
    target: Index = Field(alias="to")
    nbytes: Bytes = Field(alias="bytes")


class DeviceFile(_File):
    """`DevicePeak`."""

    device: str
    peak: Bytes
    budget: Bytes | None
    reserve: Bytes


class OptimalityFile(_File):
    """`Optimality`; ``proven`` and ``gap`` follow from the rest."""

    criterion: str
    value: float
    lower_bound: float
    proven: bool
    gap: float


class BoundaryFile(_File):
    """`Boundary`."""

    index: Index
    last: str
    first: str
    left: float
    right: float
    nbytes: Bytes
    next_best: str | None
    next_value: float | None


class PlanFile(_File):
    """`Plan`, in the order in which the file has its keys."""

    version: Literal[1]
    fits: bool
    objective: Literal["throughput", "memory", "latency"]
    processes: bool
    replicas: Count
    microbatches: Count
    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]
    precision: Literal["fp32", "bf16", "fp16"]
    batch_norm: Literal["per_microbatch", "deferred", "sync"]
    optimizer: str | dict[str, Bytes]
    training: bool
    step_seconds: Seconds
    fingerprint: str
    stages: list[StageFile] = Field(min_length=1)
    devices: list[DeviceFile]
    transfers: list[TransferFile]
    checkpoint: list[str]
    offload: list[str]
    notes: list[str]
    optimality: OptimalityFile | None
    extra_time: OptimalityFile | None
    boundaries: list[BoundaryFile]
    node_layers: dict[str, str]


def read_plan_file(data: Any, source: str) -> PlanFile:
    """``data`` as a checked `PlanFile`. Raises ``PlanError`` with every problem and its pointer."""
    if not isinstance(data, Mapping):
        raise _error(source, [("/", "an object was expected here")])
    if "stages" not in data and "devices" in data:
        raise PlanError(
            source,
            "is a placement spec, not a plan",
            f"make one: placer plan MODEL {source} --input … -o plan.json",
        )
    version = data.get("version")
    if isinstance(version, int) and version > VERSION:
        raise PlanError(
            f"{source} /version",
            f"this plan has version {version}; this placer reads version {VERSION}",
            "update placer, or plan again",
        )
    try:
        file = PlanFile.model_validate(data)
    except ValidationError as error:
        problems = dict.fromkeys(_explain(detail, data) for detail in error.errors())
        raise _error(source, list(problems)) from None
    inconsistent = list(_inconsistencies(file))
    if inconsistent:
        raise _error(source, inconsistent)
    return file


def _explain(detail: Any, data: Any) -> tuple[str, str]:
    where = json_pointer(detail["loc"], data)
    last = str(detail["loc"][-1])
    if detail["type"] == "extra_forbidden":
        near = nearest(last, _keys_beside(detail["loc"]))
        return where, "is not a key of a plan" + (f"; did you mean {near!r}?" if near else "")
    if detail["type"] == "missing":
        return f"{where.rstrip('/')}/{last}", "is missing"
    message = detail["msg"].removeprefix("Input should be ")
    expected = _JSON_WORDS.get(message, message)
    found = repr(detail["input"])
    return where, f"{found if len(found) <= 60 else found[:57] + '...'} where {expected} belongs"


def _keys_beside(loc: tuple[int | str, ...]) -> list[str]:
    homes: dict[str, type[_File]] = {
        "stages": StageFile,
        "devices": DeviceFile,
        "transfers": TransferFile,
    }
    home: type[_File] = PlanFile if len(loc) == 1 else homes.get(str(loc[0]), PlanFile)
    if "memory" in loc[:-1]:
        home = MemoryFile
    if "regions" in loc[:-1]:
        home = RegionFile
    return [field.alias or name for name, field in home.model_fields.items()]


_Problems = Iterator[tuple[str, str]]


def _inconsistencies(file: PlanFile) -> _Problems:
    """What no single field can say: counts and references that must agree."""
    yield from _wrong_optimizer(file)
    yield from _wrong_stages(file)
    yield from _wrong_nodes(file)
    yield from _wrong_devices(file)
    yield from _wrong_transfers(file)
    yield from _wrong_boundaries(file)


def _wrong_optimizer(file: PlanFile) -> _Problems:
    known = ", ".join(repr(name) for name in OPTIMIZERS)
    if isinstance(file.optimizer, str):
        if file.optimizer not in OPTIMIZERS:
            yield "/optimizer", f"{file.optimizer!r} where one of {known} belongs"
    elif set(file.optimizer) != {"bytes_per_parameter"}:
        yield "/optimizer", f'one of {known}, or {{"bytes_per_parameter": n}}, belongs here'


def _wrong_stages(file: PlanFile) -> _Problems:
    layers = set(file.node_layers.values())
    for i, stage in enumerate(file.stages):
        if stage.index != i:
            yield f"/stages/{i}/index", f"{stage.index} where {i} belongs: stages are in order"
        if len(stage.devices) != file.replicas:
            yield (
                f"/stages/{i}/devices",
                f"{len(stage.devices)} device(s) where one for each of {file.replicas} belongs",
            )
        for k, layer in enumerate(stage.layers):
            if layer not in layers:
                yield f"/stages/{i}/layers/{k}", f"{layer!r} is the layer of no node"
        place = {node: position for position, node in enumerate(stage.nodes)}
        reached = -1
        for number, region in enumerate(stage.regions):
            first, last = place.get(region.first, -1), place.get(region.last, -1)
            if not reached < first <= last:
                yield (
                    f"/stages/{i}/regions/{number}",
                    f"{region.first!r} … {region.last!r} is no run of the stage's nodes after the "
                    "region before it",
                )
            reached = max(reached, last)


def _wrong_nodes(file: PlanFile) -> _Problems:
    stage_of: dict[str, int] = {}
    for i, stage in enumerate(file.stages):
        for k, node in enumerate(stage.nodes):
            if node in stage_of:
                yield f"/stages/{i}/nodes/{k}", f"{node!r} is on stage {stage_of[node]} as well"
            elif node not in file.node_layers:
                yield f"/stages/{i}/nodes/{k}", f"{node!r} is not among /node_layers"
            stage_of.setdefault(node, i)
    for node in file.node_layers:
        if node not in stage_of:
            yield f"/node_layers/{escape_token(node)}", f"{node!r} is on no stage"


def _wrong_devices(file: PlanFile) -> _Problems:
    """Names, a peak for every device, and which replica each serves."""
    known: set[str] = set()
    for i, device in enumerate(file.devices):
        where = f"/devices/{i}/device"
        if device.device in known:
            yield where, f"{device.device!r} has a peak in /devices already"
        known.add(device.device)
        try:
            if device_name(device.device) != device.device:
                yield where, f"{device.device!r} where {device_name(device.device)!r} belongs"
        except ValueError as error:
            yield where, str(error)
    used: dict[str, tuple[int, str]] = {}  # device -> its replica, and its place's first device
    for i, stage in enumerate(file.stages):
        for replica, name in enumerate(stage.devices):
            where = f"/stages/{i}/devices/{replica}"
            serves = replica, stage.devices[0]
            if name not in known:
                yield where, f"{name!r} has no peak in /devices"
            elif used.setdefault(name, serves) != serves:
                yield where, f"{name!r} serves another place, or another replica, too"
    for i, device in enumerate(file.devices):
        if device.device not in used:
            yield f"/devices/{i}/device", f"{device.device!r} is the device of no stage"


def _wrong_transfers(file: PlanFile) -> _Problems:
    stage_of = {node: i for i, stage in enumerate(file.stages) for node in stage.nodes}
    seen: set[tuple[str, int]] = set()
    for i, transfer in enumerate(file.transfers):
        if not transfer.source < transfer.target < len(file.stages):
            yield (
                f"/transfers/{i}",
                f"goes from stage {transfer.source} to {transfer.target}: a later stage of the "
                f"{len(file.stages)} belongs there",
            )
        elif transfer.value not in stage_of:
            yield f"/transfers/{i}/value", f"{transfer.value!r} is a node of no stage"
        elif stage_of[transfer.value] != transfer.source:
            yield (
                f"/transfers/{i}/from",
                f"{transfer.source} where {stage_of[transfer.value]} belongs: that stage has "
                f"{transfer.value!r}",
            )
        elif (transfer.value, transfer.target) in seen:
            yield f"/transfers/{i}", f"{transfer.value!r} goes to stage {transfer.target} already"
        seen.add((transfer.value, transfer.target))


def _wrong_boundaries(file: PlanFile) -> _Problems:
    nodes = [set(stage.nodes) for stage in file.stages]
    for i, boundary in enumerate(file.boundaries):
        if boundary.index != i or i + 1 >= len(nodes):
            yield (
                f"/boundaries/{i}/index",
                f"{boundary.index}: the {len(nodes)} stage(s) have {len(nodes) - 1} boundaries, "
                "in order",
            )
            continue
        for field, stage in (("last", i), ("first", i + 1)):
            node = getattr(boundary, field)
            if node not in nodes[stage]:
                yield f"/boundaries/{i}/{field}", f"{node!r} is no node of stage {stage}"
        if boundary.next_best is not None and boundary.next_best not in file.node_layers:
            yield f"/boundaries/{i}/next_best", f"{boundary.next_best!r} is a node of no stage"


def _error(source: str, problems: list[tuple[str, str]]) -> PlanError:
    remedy = "plan again, or restore the file: a plan is written by placer, not by hand"
    if len(problems) == 1:
        return PlanError(f"{source} {problems[0][0]}", problems[0][1], remedy)
    lines = [f"{where}: {problem}" for where, problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"… and {len(problems) - _MOST_PROBLEMS} more")
    text = f"{len(problems)} problems in the plan\n" + "\n".join(lines)
    return PlanError(source, text, remedy)
