"""Random numbers of Python and numpy in forward: a graph cannot draw them, a single-node module can."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from placer.generators import random_state, set_random_state
from placer.program.failure import Untraceable


class PythonRandomDraw(Untraceable):
    """Forward draws from ``random`` or ``numpy.random``; a recorded draw would be the same in every run."""


GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


@contextmanager
def forbid_python_random(generators: Sequence[Any] = ()) -> Iterator[None]:
    """Raise ``PythonRandomDraw`` at the end if the block drew random numbers from Python or numpy.

    That is, from their global generators, or from one of ``generators``.
    """

    def states() -> tuple[Any, ...]:
        return *python_random_state(), *(pickle.dumps(state_of(x)) for x in generators)

    before = states()
    yield
    if states() != before:
        raise PythonRandomDraw("it draws from Python's or numpy's random numbers")


@contextmanager
def keep_random(*devices: torch.device) -> Iterator[None]:
    """Restore the generators of ``random``, ``numpy.random``, torch (CPU) and CUDA ``devices`` at the end."""
    python, numbers = random.getstate(), np.random.get_state()
    torchs = torch.default_generator.get_state()
    gpus = [(device, random_state(device)) for device in devices if device.type == "cuda"]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.default_generator.set_state(torchs)
        for device, state in gpus:
            set_random_state(device, state)


def state_of(generator: Any) -> Any:
    """The state of one of ``GENERATORS``."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Set the state of one of ``GENERATORS``."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def python_random_state() -> tuple[Any, ...]:
    """The states of ``random`` and ``numpy.random``, to be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
