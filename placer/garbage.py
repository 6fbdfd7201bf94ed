"""Keeps Python's garbage collector from scanning every object of the process while placer plans."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FROZEN_BY_PYTHON = 1_000  # objects at most; Python 3.12 freezes 375 when it starts
# By how many the objects grow until Python collects the newest ones; every hundredth time it collects all. By
# default these are 700, with which a scan of 7,000 operations spent 3 of 15 seconds in collections.
_NEW_OBJECTS = 50_000
_in_block = False  # blocks are nested, and Python counts frozen objects one by one


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """In this block, Python collects only garbage that was made in the block.

    After ``import torch`` a process has some 400,000 objects, and scanning all of them takes up to 0.2
    seconds. Planning makes so many objects that Python would do this several times, and few of them are
    garbage, so Python looks for it less often. Does nothing in a process that has frozen objects of its own
    (`gc.freeze`).
    """
    global _in_block
    if _in_block or gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        yield
        return
    _in_block = True
    thresholds = gc.get_threshold()
    gc.freeze()
    if gc.isenabled() and thresholds[0]:
        gc.set_threshold(max(_NEW_OBJECTS, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        _in_block = False
