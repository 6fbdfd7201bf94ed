"""Write a benchmark's result: a Markdown page with its command, machine and versions."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torchvision

from placer.machine.catalogue import CATALOGUE
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


def write_page(
    name: str,
    title: str,
    command: str,
    lines: Sequence[str],
    *,
    folder: Path = RESULTS,
    show: bool = True,
) -> Path:
    """Write ``<name>.md`` with the Markdown ``lines`` to ``folder``, and print it."""
    page = [f"# {title}", "", f"`{command}`", "", *lines, machine(), ""]
    path = folder / f"{name}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(page))
    if show:
        print("\n".join(page))
    return path


def machine() -> str:
    """One sentence: date, processor, cores, memory, GPU, versions."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"Measured {datetime.date.today()} on {processor_name()}, {os.cpu_count()} cores, "
        f"{pages / 2**30:.0f} GiB, {versions()}."
    )


@functools.cache
def versions() -> str:
    """The GPU with its driver, and the versions of Python, torch, cuDNN and torchvision."""
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        found += [f"cuDNN {torch.backends.cudnn.version()}"]
    found += [f"torchvision {torchvision.__version__}"]
    return f"{gpu_name()}{_driver()}; {', '.join(found)}"


@functools.cache
def gpu_name() -> str:
    """The first GPU's name, or "no GPU".

    Asked of ``nvidia-smi`` if it is there: torch would make a context, which takes memory of the GPU
    while other processes measure.
    """
    if not torch.cuda.is_available():
        return "no GPU"
    return _ask_driver("name") or torch.cuda.get_device_name()


def gpu_kind(name: str | None = None) -> str:
    """The kind in the catalogue of a GPU with this name, by default of this machine's.

    >>> gpu_kind("NVIDIA H100 80GB HBM3"), gpu_kind("NVIDIA GeForce RTX 4090")
    ('h100', 'rtx4090')
    """
    name = gpu_name() if name is None else name
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    found = [kind for kind in CATALOGUE if kind in joined]
    if not found:
        raise ValueError(f"the catalogue has no kind for {name}; `placer calibrate` measures one")
    return max(found, key=len)


def _driver() -> str:
    found = _ask_driver("driver_version") if torch.cuda.is_available() else ""
    return f" (driver {found})" if found else ""


def _ask_driver(field: str) -> str:
    """A field of the first GPU that this process may see; "" if ``nvidia-smi`` cannot say."""
    return next(iter(_driver_says(f"--query-gpu={field}")), "")


def gpu_users() -> list[str]:
    """The processes that use the first GPU; none if ``nvidia-smi`` cannot say."""
    return _driver_says("--query-compute-apps=pid")


def _driver_says(query: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    chosen = ["-i", seen] if seen else []
    command = ["nvidia-smi", *chosen, query, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
