"""Save and load plans as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from placer.errors import PlanError
from placer.files import writing
from placer.jsonfile import JSONError, read_json
from placer.plan.problems import inconsistencies, plan_error, type_problems, wrong_value
from placer.plan.types import Plan

VERSION = 1  # of the format
_PLAN = TypeAdapter(Plan)
_HOW_GOOD = ("optimality", "extra_time")  # the fields of a plan that are an `Optimality`
_DERIVED = ("proven", "gap")  # its properties that a file has too, for readers; not read back


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """``plan`` as JSON values, with keys in a fixed order; memory is in bytes, times are in seconds."""
    values = _PLAN.dump_python(plan, mode="json", by_alias=True)
    for name in _HOW_GOOD:
        if values[name] is not None:
            values[name] |= {key: getattr(getattr(plan, name), key) for key in _DERIVED}
    # Fields that were added later are left out at their defaults.
    if plan.example_microbatches is None:
        del values["example_microbatches"]
    for stage in values["stages"]:
        for region in stage["regions"]:
            if not region["overlapped"]:
                del region["overlapped"]
    if plan.host is None:
        del values["host"]
    if plan.optimizer_seconds == 0:
        del values["optimizer_seconds"]
    return {"version": VERSION, **values}


def plan_from_json(data: Mapping[str, Any], *, source: str = "plan") -> Plan:
    """The plan in ``data``, as `plan_to_json` returns it; ``source`` names it in errors.

    Raises ``PlanError`` with the JSON pointer of every key that is missing or unknown, of a wrong type,
    or inconsistent with others.
    """
    _check_version(data, source)
    values = {key: value for key, value in data.items() if key != "version"}
    missing = []
    for name in _HOW_GOOD:
        if isinstance(known := values.get(name), Mapping):
            missing += [(f"/{name}/{key}", "is missing") for key in _DERIVED if key not in known]
            values[name] = {key: value for key, value in known.items() if key not in _DERIVED}
    problems = []
    try:
        # From JSON, strict mode takes lists as tuples.
        plan = _PLAN.validate_json(json.dumps(values))
    except ValidationError as error:
        problems = type_problems(error, values)
    except (TypeError, ValueError, RecursionError) as error:
        problems = [("/", f"holds a value that JSON cannot represent: {error}")]
    problems += missing
    if problems or (problems := list(inconsistencies(plan))):
        raise plan_error(source, problems)
    return plan


def _check_version(data: Any, source: str) -> None:
    """Raise ``PlanError`` unless ``data`` is a plan of this version."""
    if not isinstance(data, Mapping):
        raise plan_error(source, [("/", "an object was expected here")])
    if "stages" not in data and "devices" in data:
        raise PlanError(
            source,
            "is a placement spec, not a plan",
            f"make one: placer plan MODEL {source} --input … -o plan.json",
        )
    if "version" not in data:
        raise plan_error(source, [("/version", "is missing")])
    version = data["version"]
    if not isinstance(version, int) or isinstance(version, bool):
        raise plan_error(source, [wrong_value("/version", version, str(VERSION))])
    if version != VERSION:
        raise PlanError(
            f"{source} /version",
            f"this plan has version {version}; this placer reads version {VERSION}",
            "update placer, or plan again" if version > VERSION else "plan again",
        )


def plan_text(plan: Plan) -> str:
    """The text of the file for ``plan``; equal plans give equal texts."""
    return json.dumps(plan_to_json(plan), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write ``plan`` to ``path`` atomically: to a temporary file in the same folder, then a rename.

    Raises ``PlanError`` when the folder cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path, PlanError):
        try:
            temporary.write_text(plan_text(plan), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def load_plan(path: str | Path) -> Plan:
    """Read the plan in the file ``path``. Raises ``PlanError`` if it cannot be read or is no plan."""
    path = Path(path)
    try:
        data = read_json(path)
    except JSONError as error:
        place = "" if error.where == str(path) else f"{error.where}: "
        raise PlanError(str(path), f"{place}{error.problem}", error.remedy) from None
    return plan_from_json(data, source=str(path))
