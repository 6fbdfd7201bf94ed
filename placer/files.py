"""Files that are written: what is wrong where that fails is said alike everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from placer.errors import PlacerError


@contextmanager
def writing(path: Path, error: type[PlacerError] = PlacerError) -> Iterator[None]:
    """Raise ``error`` about ``path`` where the block, which writes it, fails with an ``OSError``."""
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise error(str(path), f"cannot be written: {reason}", "check the folder") from failure
