"""Load a file that contains either a spec or a saved plan."""

from __future__ import annotations

from pathlib import Path

from placer.plan.store import plan_from_json
from placer.plan.types import Plan
from placer.spec import PlacementSpec
from placer.spec.load import LayerPaths, spec_in
from placer.spec.text import SpecText


def load_spec_or_plan(path: Path, *, layer_paths: LayerPaths | None = None) -> PlacementSpec | Plan:
    """The spec, as `load_spec` reads it, or the plan in the file. Raises ``PlacerError``."""
    text = SpecText.read(path)
    data = text.values()
    if isinstance(data, dict) and isinstance(data.get("stages"), list):
        return plan_from_json(data, source=str(path))
    return spec_in(text, data, layer_paths)
