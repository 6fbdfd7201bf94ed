"""Load a file that contains either a spec or a saved plan."""

from __future__ import annotations

from pathlib import Path

from placer.plan.store import plan_from_json
from placer.plan.types import Plan
from placer.spec import PlacementSpec
from placer.spec.load import spec_in
from placer.spec.text import SpecText


def load_spec_or_plan(path: Path) -> PlacementSpec | Plan:
    """The spec or plan in the file; a plan is an object with ``stages``. Raises ``PlacerError``."""
    text = SpecText.read(path)
    data = text.values()
    if isinstance(data, dict) and "stages" in data:
        return plan_from_json(data, source=str(path))
    return spec_in(text, data)
