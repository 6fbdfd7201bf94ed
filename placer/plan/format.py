"""The plan file: its shape in JSON, as strict pydantic models, and what is wrong with a bad one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from placer.errors import PlanError, nearest
from placer.jsonfile import json_pointer

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


class _File(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True
    )


class MemoryFile(_File):
    """`StageMemory`, in bytes."""

    parameters: NonNegativeInt
    gradients: NonNegativeInt
    optimizer: NonNegativeInt
    buffers: NonNegativeInt
    saved: NonNegativeInt
    boundary: NonNegativeInt
    transient: NonNegativeInt
    peak: NonNegativeInt


class RegionFile(_File):
    """`placer.regions.Region`."""

    first: str
    last: str
    recompute: bool
    offload: bool


class StageFile(_File):
    """`StagePlan`."""

    index: NonNegativeInt
    devices: list[str]
    layers: list[str]
    nodes: list[str]
    memory: MemoryFile
    budget: NonNegativeInt | None
    reserve: NonNegativeInt
    forward_seconds: float
    backward_seconds: float
    regions: list[RegionFile] = []


class TransferFile(_File):
    """`Transfer`, with the words of the JSON."""

    value: str
    source: NonNegativeInt = Field(alias="from")
    target: NonNegativeInt = Field(alias="to")
    nbytes: NonNegativeInt = Field(alias="bytes")


class DeviceFile(_File):
    """`DevicePeak`."""

    device: str
    peak: NonNegativeInt
    budget: NonNegativeInt | None
    reserve: NonNegativeInt


class OptimalityFile(_File):
    """`Optimality`; ``proven`` and ``gap`` follow from the rest."""

    criterion: str
    value: float
    lower_bound: float
    proven: bool
    gap: float


class BoundaryFile(_File):
    """`Boundary`."""

    index: NonNegativeInt
    last: str
    first: str
    left: float
    right: float
    nbytes: NonNegativeInt
    next_best: str | None
    next_value: float | None


class PlanFile(_File):
    """`Plan`, in the order in which the file has its keys."""

    version: Literal[1]
    fits: bool
    objective: str
    processes: bool
    replicas: int = Field(ge=1)
    microbatches: int = Field(ge=1)
    schedule: str
    precision: str
    batch_norm: str
    optimizer: str | dict[str, NonNegativeInt]
    training: bool
    step_seconds: float
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


def _inconsistencies(file: PlanFile) -> Iterator[tuple[str, str]]:
    """What no single field can say: counts and references that must agree."""
    stage_of: dict[str, int] = {}
    for i, stage in enumerate(file.stages):
        if stage.index != i:
            yield f"/stages/{i}/index", f"{stage.index} where {i} belongs: stages are in order"
        if len(stage.devices) != file.replicas:
            yield (
                f"/stages/{i}/devices",
                f"{len(stage.devices)} device(s) where one for each of {file.replicas} belongs",
            )
        for node in stage.nodes:
            if node in stage_of:
                yield f"/stages/{i}/nodes", f"{node!r} is on stage {stage_of[node]} as well"
            stage_of[node] = i
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
    known = {device.device for device in file.devices}
    for i, stage in enumerate(file.stages):
        for name in stage.devices:
            if name not in known:
                yield f"/stages/{i}/devices", f"{name!r} has no peak in /devices"
    for i, transfer in enumerate(file.transfers):
        if not transfer.source < transfer.target < len(file.stages):
            yield (
                f"/transfers/{i}",
                f"goes from stage {transfer.source} to {transfer.target}: a later stage of the "
                f"{len(file.stages)} belongs there",
            )


def _error(source: str, problems: list[tuple[str, str]]) -> PlanError:
    remedy = "plan again, or restore the file: a plan is written by placer, not by hand"
    if len(problems) == 1:
        return PlanError(f"{source} {problems[0][0]}", problems[0][1], remedy)
    lines = [f"{where}: {problem}" for where, problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"… and {len(problems) - _MOST_PROBLEMS} more")
    text = f"{len(problems)} problems in the plan\n" + "\n".join(lines)
    return PlanError(source, text, remedy)
