"""Load a file that contains either a spec or a saved plan."""

from __future__ import annotations

from pathlib import Path

from placer.jsonfile import JSONError, parse_json
from placer.plan.store import plan_from_json
from placer.plan.types import Plan
from placer.spec import PlacementSpec
from placer.spec.load import parse_spec, read_spec_text


def load_spec_or_plan(path: Path) -> PlacementSpec | Plan:
    """The spec or plan in the file; a plan is an object with ``stages``. Raises ``PlacerError``."""
    text = read_spec_text(path)
    try:
        data, _ = parse_json(text)
    except JSONError:
        data = None  # `parse_spec` reports what is wrong
    if isinstance(data, dict) and "stages" in data:
        return plan_from_json(data, source=str(path))
    return parse_spec(text, str(path))
