"""`placer.garbage.only_new_garbage`: existing objects are not scanned while placer plans."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import placer
from placer.garbage import only_new_garbage


class _Loop:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _python_s_own_threshold() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(700, *thresholds[1:])
    yield
    gc.set_threshold(*thresholds)


def test_old_garbage_stays_until_the_block_ends() -> None:
    old = weakref.ref(_Loop())
    with only_new_garbage():
        new = weakref.ref(_Loop())
        gc.collect()
        assert old() is not None and new() is None
    gc.collect()
    assert old() is None


def test_planning_unfreezes_also_when_it_fails() -> None:
    model, spec = nn.Linear(4, 4), {"devices": ["cpu"], "stages": ["nowhere"]}
    with pytest.raises(placer.PlacerError):
        placer.make_plan(model, spec, torch.randn(2, 4))
    with pytest.raises(placer.PlacerError):
        placer.make_plan(model, {"devices": ["cpu"]}, torch.randn(2, 5))
    assert gc.get_freeze_count() == 0
