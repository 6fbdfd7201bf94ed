"""Get example arguments from a callable that the user wrote: ``--input path/file.py:callable``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from placer.importing import ModelError, find_callable, user_failure


def load_example(target: str, *, values_needed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call ``target``, and return the positional and keyword arguments of forward that it makes.

    It may return a tuple of positional arguments, a dict of keyword arguments, a pair of both, or a
    single argument. Raises ``ModelError`` if it is not found, if it raises an exception, or if it
    returns tensors on ``meta`` and ``values_needed`` is set.
    """
    make = find_callable(target)
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise user_failure(target, "the example input", error) from error
    match made:
        case (tuple() as args, dict() as kwargs):
            pass
        case tuple():
            args, kwargs = made, {}
        case dict():
            args, kwargs = (), made
        case _:
            args, kwargs = (made,), {}
    unnamed = [key for key in kwargs if not isinstance(key, str)]
    if unnamed:
        raise ModelError(
            target,
            f"returned a dict with the key {unnamed[0]!r}, which names no argument of forward",
            "return a tuple with the dict in it, if the dict is one argument",
        )
    if values_needed and any(
        leaf.device.type == "meta"
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    ):
        raise ModelError(
            target,
            "returned a tensor on meta, and a real step needs its values",
            "make it in memory",
        )
    return args, kwargs
