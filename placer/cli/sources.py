"""Files that may hold a spec or a saved plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from placer.errors import PlacerError, nearest
from placer.plan.store import plan_from_json
from placer.plan.types import Plan
from placer.spec import PlacementSpec, load_spec


def load_spec_or_plan(path: Path) -> PlacementSpec | Plan:
    """What the file holds; a plan is an object with ``stages``. Raises ``PlacerError``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return load_spec(path)  # it says what is wrong with the file
    if isinstance(data, dict) and "stages" in data:
        return plan_from_json(data, source=str(path))
    return load_spec(path)


def load_json(path: Path) -> Any:
    """The JSON value in the file. Raises ``PlacerError``."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*.json")] if path.parent.is_dir() else []
        near = nearest(path.name, beside)
        hint = f"did you mean {str(path.parent / near)!r}?" if near else "check the path"
        raise PlacerError(str(path), "no such file", hint) from None
    except (OSError, ValueError) as error:
        raise PlacerError(str(path), f"is not JSON that can be read: {error}") from None
