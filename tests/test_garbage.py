"""`placer.garbage.only_new_garbage`: existing objects are not scanned while placer plans."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

import placer

_OLD_AND_NEW = """
import gc, weakref
from placer.garbage import only_new_garbage

class Loop:
    def __init__(self):
        self.itself = self

old = weakref.ref(Loop())
with only_new_garbage():
    new = weakref.ref(Loop())
    with only_new_garbage():
        pass
    gc.collect()
    assert old() is not None and new() is None
gc.collect()
assert old() is None
with only_new_garbage():
    again = weakref.ref(Loop())
    gc.collect()
    assert again() is None and gc.get_freeze_count()
"""


def test_old_garbage_stays_until_the_block_ends() -> None:
    """In a process without the millions of objects of the tests, which take seconds to look through."""
    subprocess.run([sys.executable, "-c", _OLD_AND_NEW], check=True)


def test_planning_unfreezes_also_when_it_fails() -> None:
    model, spec = nn.Linear(4, 4), {"devices": ["cpu"], "stages": ["nowhere"]}
    with pytest.raises(placer.PlacerError):
        placer.make_plan(model, spec, torch.randn(2, 4))
    with pytest.raises(placer.PlacerError):
        placer.make_plan(model, {"devices": ["cpu"]}, torch.randn(2, 5))
    assert gc.get_freeze_count() == 0
