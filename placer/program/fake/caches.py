"""Isolate runs on fake tensors from the caches of the model's code.

A ``functools.lru_cache`` keeps results of earlier calls. In a recording, a cached size would be a plain
number and a cached tensor a constant, and later the model must not find fake tensors in the cache. So cached
functions are replaced by wrappers while a model runs on fake tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from placer.program.fake.sizes import RecordedNumber, read
from placer.program.objects.reachable import ReachableState, Reference


@contextmanager
def isolated_caches(reachable: ReachableState) -> Iterator[None]:
    """Run this block without leaving results in functools caches (this thread only).

    Calls of a cached function with recorded sizes in their arguments bypass its cache. Other calls use the
    cache, unless the result contains a tensor: such a result is kept for this block only, and the cache that
    got it is cleared.
    """
    wrappers: dict[int, Any] = {}  # id of a cached function -> its wrapper in this block
    replaced: list[tuple[Reference, Any]] = []
    try:
        for reference in reachable.cached:
            if reference.read() is reference.value:
                if id(reference.value) not in wrappers:
                    wrappers[id(reference.value)] = _wrapper(reference.value)
                wrapper = wrappers[id(reference.value)]
                reference.write(wrapper)
                replaced.append((reference, wrapper))
        yield
    finally:
        for reference, wrapper in reversed(replaced):
            if reference.read() is wrapper:  # otherwise the model's code has replaced it
                reference.write(reference.value)


def _is_of_a_run(value: Any) -> bool:
    """Does ``value`` contain tensors, or sizes of a recording?"""
    leaves = [*value] if isinstance(value, set) else list(tree_iter(value))
    if isinstance(value, dict):
        leaves += [leaf for key in value for leaf in tree_iter(key)]
    return any(isinstance(leaf, Tensor | RecordedNumber) for leaf in leaves)


def _wrapper(cached: Any) -> Callable[..., Any]:
    """A function that replaces ``cached``, a function with a ``functools.lru_cache``."""
    thread = threading.get_ident()
    function = cached.__wrapped__
    computed: list[Any] = []  # a result that the current call has already computed

    def compute(*args: Any, **kwargs: Any) -> Any:
        return computed.pop() if computed else function(*args, **kwargs)

    kept = functools.lru_cache(cached.cache_parameters()["maxsize"])(compute)  # for this block
    gives_tensors = False
    depth = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal gives_tensors, depth
        if threading.get_ident() != thread:
            return cached(*args, **kwargs)
        if any(isinstance(leaf, RecordedNumber) for leaf in tree_iter((args, kwargs))):
            if depth:  # it is recursive, which could take exponential time without a cache
                args, kwargs = tree_map(read, (args, kwargs))
                return kept(*args, **kwargs)
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
        if gives_tensors:
            return kept(*args, **kwargs)
        misses = cached.cache_info().misses
        value = cached(*args, **kwargs)
        if not _is_of_a_run(value):
            return value
        gives_tensors = True
        if cached.cache_info().misses > misses:
            computed.append(value)
            cached.cache_clear()
        return kept(*args, **kwargs)

    functools.update_wrapper(call, function)
    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(kept, name))
    return call
