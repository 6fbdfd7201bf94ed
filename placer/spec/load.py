"""Read specs. A spec is data: nothing in it is imported or run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placer.errors import SpecError
from placer.jsonfile import JSONError, parse_json, read_text
from placer.spec.explain import spell
from placer.spec.types import PlacementSpec


def load_spec(source: str | Path | Mapping[str, Any]) -> PlacementSpec:
    """The spec in ``source``: a path, JSON text that starts with ``{``, or a mapping.

    Raises ``SpecError`` with every problem of the file, each with its JSON pointer.
    """
    if isinstance(source, Mapping):
        return PlacementSpec.model_validate(dict(source))
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return parse_spec(source, SpecError.UNNAMED)
    path = Path(source)
    return parse_spec(read_spec_text(path), str(path))


def read_spec_text(path: Path) -> str:
    """The text of the file. Raises ``SpecError`` if it cannot be read."""
    try:
        return read_text(path)
    except JSONError as error:
        raise _spec_error(str(path), error) from None


def parse_spec(text: str, source: str) -> PlacementSpec:
    """The spec in the JSON ``text``; ``source`` names it in errors. Raises ``SpecError``."""
    data = _parse(text, source)
    if not isinstance(data, Mapping):
        remedy = 'write {"devices": ["cuda:0", "cuda:1"]}'
        raise SpecError(
            source, [("/", f"{spell(data)} was found where an object was expected", remedy)]
        )
    if "fingerprint" in data and "stages" in data:
        remedy = (
            "'placer plan' takes a spec; 'simulate', 'verify' and 'report' take a plan "
            "(in Python: placer.load_plan)"
        )
        raise SpecError(source, [(source, "is a plan, not a spec", remedy)])
    return PlacementSpec.model_validate(data, context={"source": source})


def _parse(text: str, source: str) -> Any:
    try:
        data, twice = parse_json(text)
    except JSONError as error:
        raise _spec_error(source, error) from None
    if twice:
        problems = [("/", f"the key {key!r} is written twice", "keep one") for key in twice]
        raise SpecError(source, problems)
    return data


def _spec_error(source: str, error: JSONError) -> SpecError:
    return SpecError(source, [(error.where, error.problem, error.remedy)])
