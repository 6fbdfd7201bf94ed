"""``placer schema``: the JSON Schema of specs, for editors."""

from __future__ import annotations

from placer.cli.output import print_text

EXAMPLE = "placer schema > placement.schema.json"


def schema() -> None:
    """Print the JSON Schema of placement specs."""
    from placer.spec import schema_text

    print_text(schema_text())
