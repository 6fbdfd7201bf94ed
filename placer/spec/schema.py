"""The JSON Schema of placement specs, for editors."""

from __future__ import annotations

import functools
import json
from typing import Any

from placer.spec.types import PlacementSpec


@functools.cache
def spec_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) in `specs/placement.schema.json`."""
    schema = PlacementSpec.model_json_schema(by_alias=True)
    schema["required"].remove("devices")
    schema["oneOf"] = [{"required": ["devices"]}, {"required": ["machine"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """The schema as JSON text, the content of that file."""
    return json.dumps(spec_schema(), indent=2) + "\n"
