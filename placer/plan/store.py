"""Plans as JSON: the lock file that is saved, reviewed and used again."""

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
_HOW_GOOD = ("optimality", "extra_time")  # the fields that are an `Optimality`, and
_DERIVED = ("proven", "gap")  # what a file says of it besides: for readers, computed again


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """``plan`` as JSON values, keys in a fixed order; bytes are integers, times seconds."""
    values = _PLAN.dump_python(plan, mode="json", by_alias=True)
    for name in _HOW_GOOD:
        if values[name] is not None:
            values[name] |= {key: getattr(getattr(plan, name), key) for key in _DERIVED}
    if plan.example_microbatches is None:  # nearly always; files of before do not have it
        del values["example_microbatches"]
    for stage in values["stages"]:
        for region in stage["regions"]:
            if not region["overlapped"]:
                del region["overlapped"]
    if plan.host is None:
        del values["host"]
    if not plan.optimizer_seconds:  # as in files of before it was there
        del values["optimizer_seconds"]
    return {"version": VERSION, **values}


def plan_from_json(data: Mapping[str, Any], *, source: str = "plan") -> Plan:
    """The plan in ``data``, as `plan_to_json` wrote it; ``source`` names it in errors.

    Raises ``PlanError`` with the JSON pointer of everything missing, mistyped, unknown or at odds.
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
        plan = _PLAN.validate_json(json.dumps(values))  # as JSON, where a list is a strict tuple
    except ValidationError as error:
        problems = type_problems(error, values)
    except (TypeError, ValueError, RecursionError) as error:
        problems = [("/", f"holds what JSON cannot: {error}")]
    problems += missing
    if problems or (problems := list(inconsistencies(plan))):
        raise plan_error(source, problems)
    return plan


def _check_version(data: Any, source: str) -> None:
    """Raise ``PlanError`` unless ``data`` is an object that says it is a plan of this version."""
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
    """``plan`` as the text of its file; the same plan gives the same text."""
    return json.dumps(plan_to_json(plan), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write ``plan`` to ``path`` whole or not at all (a temporary file beside it, then a rename).

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
    """The plan in the file ``path``. Raises ``PlanError`` when it cannot be read or is no plan."""
    path = Path(path)
    try:
        data = read_json(path)
    except JSONError as error:
        place = "" if error.where == str(path) else f"{error.where}: "
        raise PlanError(str(path), f"{place}{error.problem}", error.remedy) from None
    return plan_from_json(data, source=str(path))
