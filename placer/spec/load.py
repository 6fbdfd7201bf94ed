"""Read and write specs. A spec is data: nothing in it is imported or run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placer.errors import SpecError, nearest
from placer.spec.types import PlacementSpec


def load_spec(source: str | Path | Mapping[str, Any]) -> PlacementSpec:
    """The spec in ``source``: a path, JSON text that starts with ``{``, or a mapping.

    Raises ``SpecError`` with every problem of the file, each with its JSON pointer.
    """
    if isinstance(source, Mapping):
        return PlacementSpec.model_validate(dict(source))
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _validate(_parse(source, SpecError.UNNAMED), SpecError.UNNAMED)
    path = Path(source)
    return _validate(_parse(_read(path), str(path)), str(path))


def _validate(data: Any, source: str) -> PlacementSpec:
    if not isinstance(data, Mapping):
        raise SpecError(
            source,
            [("/", f"a JSON {type(data).__name__} was found where an object was expected", "")],
        )
    return PlacementSpec.model_validate(data, context={"source": source})


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = path.parent
        others = [p.name for p in folder.glob("*.json")] if folder.is_dir() else []
        near = nearest(path.name, others)
        hint = f"did you mean {str(folder / near)!r}?" if near else "check the path"
        raise SpecError(str(path), [(str(path), "no such file", hint)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(str(path), [(str(path), f"cannot be read: {error}", "")]) from None


def _parse(text: str, source: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        twice.extend(repeated)
        return dict(pairs)

    twice: list[str] = []
    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        remedy = "JSON wants double quotes, no trailing comma and no comments"
        raise SpecError(source, [(where, f"is not JSON: {error.msg}", remedy)]) from None
    if twice:
        problems = [("/", f"the key {key!r} is written twice", "keep one") for key in twice]
        raise SpecError(source, problems)
    return data
