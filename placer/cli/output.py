"""Where output goes: tables for people, JSON for machines, never both on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 100  # columns where the output is not a terminal


def people(*, as_json: bool) -> Console:
    """The console for people: stdout, or stderr when stdout is for machines."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def plain_table(**options: Any) -> Table:
    """An empty table as all commands show theirs: a line below the headers, no frame."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, **options)


def print_json(data: Any) -> None:
    """``data`` as JSON text on stdout."""
    print_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_text(text: str) -> None:
    """``text`` on stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Say on stderr what takes a while: a moving line on a terminal, a plain one elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        print(f"{doing} …", file=sys.stderr, flush=True)
        yield
        return
    with console.status(f"{doing} …"):
        yield
