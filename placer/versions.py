"""The releases of packages that placer was tested with, and the errors for other releases.

A release outside its range is not refused for its number, but by `require_torch` for a name that placer
needs and it lacks.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from placer.errors import VersionError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that configure torch's allocator; the release of torch decides which one it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The lowest and the highest release of a package that the test suite was run with.

    ``pyproject.toml`` allows all releases from ``lowest`` up to, not including, ``below``.
    """

    package: str
    lowest: str
    highest: str
    below: str

    def __contains__(self, release: str) -> bool:
        """Whether ``pyproject.toml`` allows ``release``. A local part (``+cu130``) does not count.

        >>> "2.15.0+cu130" in Range(package="torch", lowest="2.11", highest="2.15", below="2.16")
        True
        """
        return _numbers(self.lowest) <= _numbers(release) < _numbers(self.below)

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"

    @property
    def requirement(self) -> str:
        """As pip and ``pyproject.toml`` write it."""
        return f"{self.package}>={self.lowest},<{self.below}"


def _numbers(release: str) -> tuple[int, ...]:
    """The numbers that ``release`` starts with. Nothing is imported: `placer doctor` says what is missing."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^\d.]", release)[0]))


# Run by `make versions`; a test holds pyproject.toml to this table.
PYTHON = Range(package="python", lowest="3.11", highest="3.13", below="3.14")
RANGES: tuple[Range, ...] = (
    # torch's private names change with its minor releases, so the next one is not allowed unseen.
    Range(package="torch", lowest="2.11", highest="2.15", below="2.16"),
    Range(package="torchvision", lowest="0.26", highest="0.29", below="1"),
    Range(package="jinja2", lowest="3.1", highest="3.1", below="4"),
    Range(package="networkx", lowest="3.3", highest="3.7", below="4"),
    Range(package="numpy", lowest="2.0", highest="2.5", below="3"),
    Range(package="pydantic", lowest="2.11", highest="2.14", below="3"),
    Range(package="pyyaml", lowest="6.0.2", highest="6.0", below="7"),
    Range(package="rich", lowest="13.8", highest="15.0", below="16"),
    Range(package="safetensors", lowest="0.4.3", highest="0.8", below="1"),
    Range(package="typer", lowest="0.26", highest="0.29", below="1"),
)
TORCH = RANGES[0]


def found_release(package: str) -> str | None:
    """The installed release of ``package``; None if it is not installed.

    >>> found_release("no-such-package") is None
    True
    """
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def repair_command() -> str:
    """The command that installs a torch on which placer runs."""
    return f"python -m pip install '{TORCH.requirement}' torchvision"


def require_torch() -> None:
    """Raise ``VersionError`` if the installed torch lacks a name that placer needs."""
    from placer._torch import missing_names

    if missing := missing_names():
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise VersionError(
            f"torch {found_release('torch')}",
            f"has no {missing[0]}{others} (placer runs on torch {TORCH})",
            repair_command(),
        )


@contextmanager
def explain_failed_import() -> Iterator[None]:
    """Turn an import error into a ``VersionError`` if the installed torch is outside of the range."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        release = found_release("torch")
        if release is None:
            raise VersionError(
                "torch", f"is not installed (placer runs on torch {TORCH})", repair_command()
            ) from error
        if release in TORCH or not _while_importing(error):
            raise
        raise VersionError(
            f"torch {release}",
            f"cannot be used: {error} (placer runs on torch {TORCH})",
            repair_command(),
        ) from error


def _while_importing(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "_find_and_load" for frame, _ in frames)
