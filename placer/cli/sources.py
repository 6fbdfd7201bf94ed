"""Files that may hold a spec or a saved plan."""

from __future__ import annotations

from pathlib import Path

from placer.jsonfile import JSONError, read_json
from placer.plan.store import plan_from_json
from placer.plan.types import Plan
from placer.spec import PlacementSpec, load_spec


def load_spec_or_plan(path: Path) -> PlacementSpec | Plan:
    """What the file holds; a plan is an object with ``stages``. Raises ``PlacerError``."""
    try:
        data = read_json(path)
    except JSONError:
        return load_spec(path)  # it says what is wrong with the file
    if isinstance(data, dict) and "stages" in data:
        return plan_from_json(data, source=str(path))
    return load_spec(path)
