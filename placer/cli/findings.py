"""Writes what is wrong with a spec for other programs: SARIF, and annotations of GitHub's workflows."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from placer import __version__
from placer.cli.output import print_error_json, print_json, print_text
from placer.errors import BudgetError, Location, PlacerError, SpecError

# One finding: what is wrong, and where.
_Finding = tuple[str, Location | None]


def print_error_as(form: str, error: PlacerError, exit_code: int, file: str | None) -> None:
    """Print ``error`` to stdout in the form "json", "sarif" or "github"; nothing in the form "text".

    ``file`` is that of the spec, for findings about it whose place is not known.
    """
    file = file if isinstance(error, SpecError | BudgetError) else None
    if form == "json":
        print_error_json(error, exit_code)
    elif form == "sarif":
        print_json(sarif(type(error).__name__, _findings(error), file))
    elif form == "github":
        print_text("".join(_annotation(*finding, file) for finding in _findings(error)))


def _findings(error: PlacerError) -> list[_Finding]:
    problems = [(error.where, error.problem, error.remedy)]
    locations: tuple[Location | None, ...] = (error.location,)
    if isinstance(error, SpecError):
        problems, locations = list(error.problems), error.locations
    texts = [str(PlacerError(*problem)) for problem in problems]
    return list(zip(texts, locations, strict=True))


def sarif(rule: str, findings: list[_Finding], file: str | None) -> dict[str, Any]:
    """A log of SARIF 2.1.0 (OASIS) with the findings as errors."""
    results = []
    for text, location in findings:
        result: dict[str, Any] = {"ruleId": rule, "level": "error", "message": {"text": text}}
        name = location.file if location else file
        if name is not None:
            place: dict[str, Any] = {"artifactLocation": {"uri": quote(Path(name).as_posix())}}
            if location is not None:
                end = location.column + location.width
                place["region"] = {
                    "startLine": location.line,
                    "startColumn": location.column,
                    "endColumn": end,
                }
            result["locations"] = [{"physicalLocation": place}]
        results.append(result)
    tool = {"name": "placer", "version": __version__, "rules": [{"id": rule}] if results else []}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": tool}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _annotation(text: str, location: Location | None, file: str | None) -> str:
    """The command of GitHub's workflows that shows an error beside the line."""
    fields: dict[str, Any] = {} if file is None else {"file": file}
    if location is not None:
        fields = {
            "file": location.file,
            "line": location.line,
            "col": location.column,
            "endColumn": location.column + location.width,
        }
    given = {"title": "placer", **fields}.items()
    named = ",".join(
        f"{key}={_escaped(str(value)).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in given
    )
    return f"::error {named}::{_escaped(text)}\n"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
