"""A place: a device as the plan names it, and the torch device that runs it on this machine.

On a machine without GPUs the CPU runs all of them. The plan's names keep them apart, so that a dry
run (`placer.simulation`) can count the memory of each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter


@dataclass(frozen=True, slots=True)
class Place:
    """A device of the plan, called ``name`` there, and the torch ``device`` that runs it."""

    name: str
    device: torch.device


# These two are not devices of a plan:
HOST = Place("host", torch.device("cpu"))  # holds offloaded activations
CALLER = Place("caller", torch.device("cpu"))  # holds the inputs and targets that the caller passed

_current: list[Place] = []


def current_place() -> Place | None:
    """The place of the innermost `on` block: where a stage runs or a value is copied to. Or None."""
    return _current[-1] if _current else None


# Of dry runs, whose tensors are all on the CPU: the name of the place of a tensor, by their own record.
_records: list[Callable[[torch.Tensor], str | None]] = []


@contextmanager
def recording(name_of: Callable[[torch.Tensor], str | None]) -> Iterator[None]:
    """In this block, `place_of` asks ``name_of`` for the name of a tensor's place."""
    _records.append(name_of)
    try:
        yield
    finally:
        _records.remove(name_of)


def place_of(tensor: torch.Tensor, places: Sequence[Place]) -> Place | None:
    """The one of ``places`` that ``tensor`` is on; None if it is on none of them."""
    found = [place for place in places if place.device == tensor.device]
    if len(found) > 1 and _records:
        name = _records[-1](tensor)
        found = [place for place in found if place.name == name]
    return found[0] if found else None


class on:  # contextlib.contextmanager takes three times as long
    """Make ``place`` the current place in this block."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> None:
        _current.append(self._place)

    def __exit__(self, *_: object) -> None:
        _current.pop()


def is_on(device: torch.device, value: Any) -> bool:
    """Whether all tensors of ``value`` (any pytree) are on ``device``."""
    return all(x.device == device for x in tree_iter(value) if isinstance(x, torch.Tensor))
