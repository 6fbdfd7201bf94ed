"""Describe what is wrong with a plan file, each problem with its JSON pointer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from placer.errors import PlanError, nearest
from placer.jsonfile import escape_token, json_pointer
from placer.plan.types import (
    Boundary,
    DevicePeak,
    HostPeak,
    Optimality,
    Plan,
    PlannedLoss,
    StageMemory,
    StagePlan,
    Transfer,
)
from placer.quantities import format_count
from placer.regions.types import Region
from placer.spec.fields import OPTIMIZERS, device_name

_JSON_WORDS = {
    "a valid array": "a list",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
}
_TYPES: Mapping[str, type] = {  # key -> type of the object, or of the list's objects
    "stages": StagePlan,
    "memory": StageMemory,
    "regions": Region,
    "devices": DevicePeak,
    "host": HostPeak,
    "loss": PlannedLoss,
    "transfers": Transfer,
    "optimality": Optimality,
    "extra_time": Optimality,
    "boundaries": Boundary,
}
_MOST_PROBLEMS = 20

Problem = tuple[str, str]  # JSON pointer, what is wrong there
_Problems = Iterator[Problem]


def plan_error(source: str, problems: list[Problem]) -> PlanError:
    """The error for ``problems``, at least one, in the file ``source``."""
    remedy = "plan again, or restore the file: a plan is written by placer, not by hand"
    if len(problems) == 1:
        return PlanError(f"{source} {problems[0][0]}", problems[0][1], remedy)
    lines = [f"{where}: {problem}" for where, problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"… and {len(problems) - _MOST_PROBLEMS} more")
    text = f"{len(problems)} problems in the plan\n" + "\n".join(lines)
    return PlanError(source, text, remedy)


def type_problems(error: ValidationError, data: Any) -> list[Problem]:
    """The problems that pydantic found in ``data``: missing or unknown keys, values of wrong types."""
    return list(dict.fromkeys(_explain(detail, data) for detail in error.errors()))


def wrong_value(where: str, found: Any, expected: str) -> Problem:
    """The problem that ``found`` is at ``where`` instead of something ``expected``."""
    text = repr(found)
    return where, f"{text if len(text) <= 60 else text[:57] + '...'} where {expected} belongs"


def _explain(detail: Any, data: Any) -> Problem:
    where = json_pointer(detail["loc"], data)
    last = str(detail["loc"][-1]) if detail["loc"] else ""
    if detail["type"] == "unexpected_keyword_argument":
        near = nearest(last, _valid_keys(detail["loc"]))
        return where, "is not a key of a plan" + (f"; did you mean {near!r}?" if near else "")
    if detail["type"] == "missing":
        return f"{where.rstrip('/')}/{last}", "is missing"
    message = detail["msg"].removeprefix("Input should be ")
    return wrong_value(where, detail["input"], _JSON_WORDS.get(message, message))


def _valid_keys(loc: tuple[int | str, ...]) -> list[str]:
    """The valid keys of the object whose unknown key ``loc`` points to."""
    homes = (_TYPES[str(part)] for part in reversed(loc[:-1]) if str(part) in _TYPES)
    return json_keys(next(homes, Plan))


@functools.cache
def json_keys(of: type) -> list[str]:
    """The JSON keys of the dataclass ``of``; for some fields they differ from the names in Python."""
    return list(TypeAdapter(of).json_schema()["properties"])


def inconsistencies(plan: Plan) -> _Problems:
    """Problems across fields: counts and references that do not agree."""
    yield from _wrong_optimizer(plan)
    if plan.example_microbatches is not None and plan.example_microbatches >= plan.microbatches:
        fewer = f"{plan.example_microbatches} where fewer than {plan.microbatches} belong"
        yield "/example_microbatches", fewer
    yield from _wrong_loss(plan)
    yield from _wrong_stages(plan)
    yield from _wrong_nodes(plan)
    yield from _wrong_devices(plan)
    yield from _wrong_transfers(plan)
    yield from _wrong_boundaries(plan)


def _wrong_optimizer(plan: Plan) -> _Problems:
    known = ", ".join(repr(name) for name in OPTIMIZERS)
    if isinstance(plan.optimizer, str):
        if plan.optimizer not in OPTIMIZERS:
            yield "/optimizer", f"{plan.optimizer!r} where one of {known} belongs"
    elif set(plan.optimizer) != {"bytes_per_parameter"}:
        yield "/optimizer", f'one of {known}, or {{"bytes_per_parameter": n}}, belongs here'


def _wrong_loss(plan: Plan) -> _Problems:
    try:
        _ = plan.loss is not None and plan.loss.spec
    except ValidationError as error:
        yield "/loss", str(error.errors()[0]["msg"]).removeprefix("Value error, ")


def _wrong_stages(plan: Plan) -> _Problems:
    if not plan.stages:
        yield wrong_value("/stages", [], "at least one stage")
    layers = set(plan.node_layers.values())
    for i, stage in enumerate(plan.stages):
        if stage.index != i:
            yield f"/stages/{i}/index", f"{stage.index} where {i} belongs: stages are in order"
        if len(stage.devices) != plan.replicas:
            yield (
                f"/stages/{i}/devices",
                f"{format_count(len(stage.devices), 'device')} where one for each of {plan.replicas} belongs",
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
                    f"{region.first!r} … {region.last!r} are not consecutive nodes of the stage, "
                    "after the region before",
                )
            reached = max(reached, last)


def _wrong_nodes(plan: Plan) -> _Problems:
    stage_of: dict[str, int] = {}
    for i, stage in enumerate(plan.stages):
        for k, node in enumerate(stage.nodes):
            if node in stage_of:
                yield f"/stages/{i}/nodes/{k}", f"{node!r} is on stage {stage_of[node]} as well"
            elif node not in plan.node_layers:
                yield f"/stages/{i}/nodes/{k}", f"{node!r} is not among /node_layers"
            stage_of.setdefault(node, i)
    for node in plan.node_layers:
        if node not in stage_of:
            yield f"/node_layers/{escape_token(node)}", f"{node!r} is on no stage"


def _wrong_devices(plan: Plan) -> _Problems:
    """Problems of device names, of missing peaks, and of devices in several replicas."""
    known: set[str] = set()
    for i, device in enumerate(plan.devices):
        where = f"/devices/{i}/device"
        if device.device in known:
            yield where, f"{device.device!r} has a peak in /devices already"
        known.add(device.device)
        try:
            if device_name(device.device) != device.device:
                yield where, f"{device.device!r} where {device_name(device.device)!r} belongs"
        except ValueError as error:
            yield where, str(error)
    # device -> (its replica, the device of the same stages in the first replica)
    used: dict[str, tuple[int, str]] = {}
    for i, stage in enumerate(plan.stages):
        for replica, name in enumerate(stage.devices):
            where = f"/stages/{i}/devices/{replica}"
            serves = replica, stage.devices[0]
            if name not in known:
                yield where, f"{name!r} has no peak in /devices"
            elif used.setdefault(name, serves) != serves:
                yield where, f"{name!r} is used for other stages, or in another replica, too"
    for i, device in enumerate(plan.devices):
        if device.device not in used:
            yield f"/devices/{i}/device", f"{device.device!r} is the device of no stage"


def _wrong_transfers(plan: Plan) -> _Problems:
    stage_of = {node: i for i, stage in enumerate(plan.stages) for node in stage.nodes}
    seen: set[tuple[str, int]] = set()
    for i, transfer in enumerate(plan.transfers):
        if not transfer.source < transfer.target < len(plan.stages):
            yield (
                f"/transfers/{i}",
                f"goes from stage {transfer.source} to {transfer.target}: a later stage of the "
                f"{len(plan.stages)} belongs there",
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


def _wrong_boundaries(plan: Plan) -> _Problems:
    nodes = [set(stage.nodes) for stage in plan.stages]
    for i, boundary in enumerate(plan.boundaries):
        if boundary.index != i or i + 1 >= len(nodes):
            yield (
                f"/boundaries/{i}/index",
                f"{boundary.index}: boundaries are numbered in order, one fewer than the "
                f"{format_count(len(nodes), 'stage')}",
            )
            continue
        for field, stage in (("last", i), ("first", i + 1)):
            node = getattr(boundary, field)
            if node not in nodes[stage]:
                yield f"/boundaries/{i}/{field}", f"{node!r} is no node of stage {stage}"
        if boundary.next_best is not None and boundary.next_best not in plan.node_layers:
            yield f"/boundaries/{i}/next_best", f"{boundary.next_best!r} is a node of no stage"
