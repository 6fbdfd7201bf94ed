"""Save and load plans as JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from placer.errors import PlanError
from placer.files import writing
from placer.jsonfile import JSONError, read_json
from placer.plan.roles import with_devices, with_roles
from placer.plan.types import Plan

VERSION = 3  # of the format
_PLAN = TypeAdapter(Plan)
_AGAIN = "plan again: a plan is written by placer, not by hand"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """``plan`` as JSON values, with keys in a fixed order; memory is in bytes, times are in seconds.

    They have ``roles`` for the plan's devices (`placer.plan.roles`).
    """
    values = with_roles(_PLAN.dump_python(plan, mode="json", by_alias=True))
    return {"version": VERSION, "checksum": _checksum(values), **values}


def _checksum(values: Mapping[str, Any]) -> str:
    """A hash of the JSON ``values``, however their text is laid out.

    Raises ``TypeError``, ``ValueError`` or ``RecursionError`` if they cannot be JSON.
    """
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_from_json(data: Mapping[str, Any], *, source: str = "plan") -> Plan:
    """The plan in ``data``, as `plan_to_json` returns it; ``source`` names it in errors.

    Raises ``PlanError`` if ``data`` is not as placer wrote it, or was written by a placer whose plans
    have other fields.
    """
    _check_version(data, source)
    values = {key: value for key, value in data.items() if key not in ("version", "checksum")}
    try:
        intact = data.get("checksum") == _checksum(values)
    except (TypeError, ValueError, RecursionError):
        intact = False
    if not intact:
        raise PlanError(source, "is not as placer wrote it: its checksum is another", _AGAIN)
    try:
        values = with_devices(values)
    except (LookupError, TypeError, ValueError):
        raise PlanError(f"{source} /roles", "they are not those of its stages", _AGAIN) from None
    try:
        # From JSON, strict mode takes lists as tuples.
        return _PLAN.validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = "/".join(map(str, first["loc"]))
        raise PlanError(f"{source} /{where}", first["msg"], _AGAIN) from None


def _check_version(data: Any, source: str) -> None:
    """Raise ``PlanError`` unless ``data`` is a plan of this version."""
    if not isinstance(data, Mapping):
        raise PlanError(source, "is not a plan: a JSON object is expected", _AGAIN)
    if "stages" not in data and "devices" in data:
        raise PlanError(
            source,
            "is a placement spec, not a plan",
            f"make one: placer plan MODEL {source} --input … -o plan.json; --explain explains it",
        )
    if data.get("version") != VERSION:
        version = data.get("version", "none")
        problem = f"its version is {version}; this placer reads version {VERSION}"
        raise PlanError(source, problem, _AGAIN)


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
        remedy = error.remedy or f"make a plan of a spec: placer plan MODEL {path} … -o plan.json"
        raise PlanError(error.where, error.problem, remedy) from None
    return plan_from_json(data, source=str(path))
