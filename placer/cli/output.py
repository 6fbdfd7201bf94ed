"""Where output goes: tables for people, JSON for machines, never both on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console

_WIDTH = 100  # columns where the output is not a terminal


def people(*, as_json: bool) -> Console:
    """The console for people: stdout, or stderr when stdout is for machines."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def print_json(data: Any) -> None:
    """``data`` as JSON text on stdout."""
    print_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_text(text: str) -> None:
    """``text`` on stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()
