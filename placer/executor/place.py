"""Places: a device as the plan names it, and the torch device that stands for it here.

On a machine without GPUs every place is the CPU; the plan's name keeps them apart, so that the
same run can be watched by the ledger of `placer.simulation` as if the devices were real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter


@dataclass(frozen=True, slots=True)
class Place:
    """A device of the plan (``name``) and the torch device that runs it (``device``)."""

    name: str
    device: torch.device


# No devices of a plan:
HOST = Place("host", torch.device("cpu"))  # where offloaded activations wait
CALLER = Place("caller", torch.device("cpu"))  # where the caller's own tensors are

_current: list[Place] = []


def current_place() -> Place | None:
    """The place whose stage is running now, or that a value is being copied to; None outside."""
    return _current[-1] if _current else None


@contextmanager
def on(place: Place) -> Iterator[None]:
    """Say that what runs in this block belongs to ``place``."""
    _current.append(place)
    try:
        yield
    finally:
        _current.pop()


def is_on(device: torch.device, value: Any) -> bool:
    """Are all tensors of ``value`` (any pytree) on ``device``?"""
    return all(x.device == device for x in tree_iter(value) if isinstance(x, torch.Tensor))
