"""Plans as JSON: the lock file that is saved, reviewed and used again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from placer.errors import PlanError
from placer.files import writing
from placer.jsonfile import JSONError, read_json
from placer.plan.format import VERSION, PlanFile, read_plan_file
from placer.plan.types import (
    Boundary,
    DevicePeak,
    Optimality,
    Plan,
    StageMemory,
    StagePlan,
    Transfer,
)
from placer.regions import Region


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """``plan`` as JSON values, keys in a fixed order; bytes are integers, times seconds."""
    values = {"version": VERSION, **asdict(plan)}
    values["transfers"] = [
        {"value": t.value, "from": t.source, "to": t.target, "bytes": t.nbytes}
        for t in plan.transfers
    ]
    for name, how_good in (("optimality", plan.optimality), ("extra_time", plan.extra_time)):
        if how_good is not None:
            values[name] |= {"proven": how_good.proven, "gap": how_good.gap}
    optimizer = plan.optimizer
    values["optimizer"] = optimizer if isinstance(optimizer, str) else dict(optimizer)
    values["node_layers"] = dict(plan.node_layers)
    ordered: dict[str, Any] = _lists({key: values[key] for key in PlanFile.model_fields})
    return ordered


def plan_from_json(data: Mapping[str, Any], *, source: str = "plan") -> Plan:
    """The plan in ``data``, as `plan_to_json` wrote it; ``source`` names it in errors.

    Raises ``PlanError`` with the JSON pointer of everything missing, mistyped, unknown or at odds.
    """
    file = read_plan_file(data, source)
    fields = {name: getattr(file, name) for name in PlanFile.model_fields}
    del fields["version"]
    fields |= {name: tuple(fields[name]) for name in ("checkpoint", "offload", "notes")}
    fields["stages"] = tuple(
        StagePlan(
            index=stage.index,
            devices=tuple(stage.devices),
            layers=tuple(stage.layers),
            nodes=tuple(stage.nodes),
            memory=StageMemory(**stage.memory.model_dump()),
            budget=stage.budget,
            reserve=stage.reserve,
            forward_seconds=stage.forward_seconds,
            backward_seconds=stage.backward_seconds,
            regions=tuple(Region(**region.model_dump()) for region in stage.regions),
        )
        for stage in file.stages
    )
    fields["devices"] = tuple(DevicePeak(**device.model_dump()) for device in file.devices)
    fields["transfers"] = tuple(Transfer(**transfer.model_dump()) for transfer in file.transfers)
    for name in ("optimality", "extra_time"):
        if fields[name] is not None:
            derived = {"proven", "gap"}
            fields[name] = Optimality(**fields[name].model_dump(exclude=derived))
    fields["boundaries"] = tuple(Boundary(**b.model_dump(by_alias=False)) for b in file.boundaries)
    return Plan(**fields)


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


def _lists(value: Any) -> Any:
    """``value`` with lists for tuples, as JSON reads them back."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
