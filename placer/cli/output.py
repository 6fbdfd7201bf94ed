"""Output of commands: tables and text; with ``--json``, only JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partialmethod
from pathlib import Path
from typing import Any

from rich.console import Console

from placer.errors import BudgetError, Location, PlacerError, SpecError
from placer.files import writing

EXIT_DIFFERENT, EXIT_USAGE, EXIT_NO_FIT = 1, 2, 3
_WIDTH = 100  # columns if the output is not a terminal


class _Console(Console):
    """A console that cuts nothing: a table with too long a name is wider than the console."""

    print = partialmethod(Console.print, crop=False)


def human_console(*, as_json: bool) -> Console:
    """The console for tables and text: stdout, or stderr if stdout is for JSON."""
    console = _Console(stderr=as_json, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def print_json(data: Any) -> None:
    """Print ``data`` as JSON to stdout."""
    print_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_or_print(text: str, output: Path | None, what: str, console: Console) -> None:
    """Write ``text``, which is ``what``, to the file ``output`` and say so; without a file, print it."""
    if output is None:
        print_text(text)
        return
    with writing(output):
        output.write_text(text, encoding="utf-8")
    tell_written(console, what, output)


def tell_written(console: Console, what: str, path: Path) -> None:
    """Say that ``what`` was written, with the path as it is, however long."""
    console.print(f"{what} written to {path}", markup=False, soft_wrap=True)


def print_text(text: str) -> None:
    """Print ``text`` to stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_error_json(error: PlacerError, exit_code: int, *, kind: str = "") -> None:
    """Print ``error`` to stdout as a JSON object: kind, place, problem, remedy and exit code.

    With the file, line and column if they are known. A `SpecError` also has a list of ``problems``; a
    `BudgetError` has the device, the missing bytes and the changes that were tried.
    """
    found: dict[str, Any] = {
        "kind": kind or type(error).__name__,
        "place": error.where,
        "problem": error.problem,
        "remedy": error.remedy,
    }
    if isinstance(error, SpecError):
        found["problem"] = str(error.problem).partition("\n")[0]
        found["problems"] = [
            {"place": place, "problem": problem, "remedy": remedy, **_location(location)}
            for (place, problem, remedy), location in zip(
                error.problems, error.locations, strict=True
            )
        ]
    found |= _location(error.location)
    if isinstance(error, BudgetError):
        found["device"], found["missing_bytes"] = error.device, error.missing_bytes
        found["tried"] = [asdict(tried) for tried in error.tried]
    print_json({"error": found, "exit_code": exit_code})


def _location(location: Location | None) -> dict[str, Any]:
    if location is None:
        return {}
    return {"file": location.file, "line": location.line, "column": location.column}
