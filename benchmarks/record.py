"""Write a benchmark's result: a Markdown page with its command, machine and versions."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torchvision

from placer.profiling.files import processor_name

RESULTS = Path(__file__).parent / "results"


def write_result(
    name: str,
    title: str,
    command: str,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    note: str = "",
) -> Path:
    """Write ``results/<name>.md`` with one table, and print it."""
    lines = [*table(header, rows), *([note, ""] if note else [])]
    return write_page(name, title, command, lines)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table, followed by an empty line."""
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def write_page(name: str, title: str, command: str, lines: Sequence[str]) -> Path:
    """Write ``results/<name>.md`` with the Markdown ``lines``, and print it."""
    page = [f"# {title}", "", f"`{command}`", "", *lines, machine(), ""]
    path = RESULTS / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(page))
    print("\n".join(page))
    return path


def machine() -> str:
    """One sentence: date, processor, cores, memory, versions."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"Measured {datetime.date.today()} on {processor_name()}, {os.cpu_count()} cores, "
        f"{pages / 2**30:.0f} GiB, {gpu}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, torchvision {torchvision.__version__}."
    )
