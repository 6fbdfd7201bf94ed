"""Python's own random numbers in a forward: a graph cannot draw them, a module kept whole can."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from placer.capture.failure import Untraceable


@contextmanager
def forbid_python_random() -> Iterator[None]:
    """Refuse code that draws from ``random``: what it drew now would be drawn for ever."""
    before = random.getstate()
    yield
    if random.getstate() != before:
        random.setstate(before)
        raise Untraceable("it draws from Python's random numbers")


@contextmanager
def keep_python_random() -> Iterator[None]:
    """Leave the generator of ``random`` as it is."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
