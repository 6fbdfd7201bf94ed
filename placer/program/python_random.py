"""Random numbers in a forward: a graph cannot draw Python's own, a module kept whole can."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from placer.program.failure import Untraceable


class PythonRandomDraw(Untraceable):
    """It draws from ``random`` or ``numpy.random``: the draw would be the same for ever."""


@contextmanager
def forbid_python_random() -> Iterator[None]:
    """Raise ``PythonRandomDraw`` where code draws random numbers that are not torch's."""
    before = _python_state()
    yield
    if _python_state() != before:
        raise PythonRandomDraw("it draws from Python's or numpy's random numbers")


@contextmanager
def keep_random() -> Iterator[None]:
    """Leave the generators of ``random``, ``numpy.random`` and torch (CPU) as they are."""
    python, numbers = random.getstate(), np.random.get_state()
    torchs = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.default_generator.set_state(torchs)


def _python_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
