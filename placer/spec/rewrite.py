"""A rewrite of a captured graph, as plans keep it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A change of a program, by the name of a registered pass and its settings, which are JSON values.

    Settings are never sizes, because the pass is applied to every later capture again.
    """

    name: str
    settings: Mapping[str, JsonValue] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, json.dumps(dict(self.settings), sort_keys=True)))
