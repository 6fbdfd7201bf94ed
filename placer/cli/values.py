"""Parse ``key=value`` options. Values are Python or JSON literals, otherwise text."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from placer.errors import PlacerError

_JSON_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parse_values(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments in ``texts``. Raises ``PlacerError`` for a text that is not ``key=value``.

    >>> parse_values("--model-arg", ["width=32", "name=unet", "norm=None", "sizes=(1, 2)"])
    {'width': 32, 'name': 'unet', 'norm': None, 'sizes': (1, 2)}
    """
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise PlacerError(
                f"{option} {text}", "is not key=value", f"write it as {option} width=32"
            )
        if key in values:
            raise PlacerError(f"{option} {text}", f"{key!r} is given twice", "keep one")
        values[key] = _literal(value)
    return values


def _literal(text: str) -> Any:
    if text.lower() in _JSON_WORDS:
        return _JSON_WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
