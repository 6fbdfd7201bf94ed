"""Isolate runs on fake tensors from caches and global variables of the model's code.

A ``functools.lru_cache`` keeps results of earlier calls. In a recording, a cached size would be a plain
number and a cached tensor a constant, and later the model must not find fake tensors in the cache. So cached
functions are replaced by wrappers while a model runs on fake tensors. Afterwards, global variables and
containers that got tensors or sizes of the run are restored.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from placer.program.reachable import ReachableState, Reference
from placer.program.sizes import SizeFloat, SizeInt, plain


@contextmanager
def isolated_caches(reachable: ReachableState) -> Iterator[None]:
    """Run this block without leaving results in functools caches or global variables (this thread only).

    Calls of a cached function with recorded sizes in their arguments bypass its cache. Other calls use the
    cache, unless the result contains a tensor: such a result is kept for this block only, and the cache that
    got it is cleared.
    """
    wrappers: dict[int, Any] = {}  # id of a cached function -> its wrapper in this block
    replaced: list[tuple[Reference, Any]] = []
    containers: list[tuple[Any, Any]] = []  # (container, shallow copy)
    variables: list[tuple[Reference, Any]] = []  # (reference, value)
    try:
        for reference in reachable.cached:
            if reference.read() is reference.value:
                if id(reference.value) not in wrappers:
                    wrappers[id(reference.value)] = _wrapper(reference.value)
                wrapper = wrappers[id(reference.value)]
                reference.write(wrapper)
                replaced.append((reference, wrapper))
        # Most containers are empty hook tables of modules, which need no copy.
        containers += [(found, found.copy() if found else ()) for found in reachable.containers]
        variables += [(reference, reference.read()) for reference in reachable.variables]
        yield
    finally:
        for reference, before in reversed(variables):
            _restore_variable(reference, before)
        for container, copy in reversed(containers):
            _restore(container, copy)
        for reference, wrapper in reversed(replaced):
            if reference.read() is wrapper:  # otherwise the model's code has replaced it
                reference.write(reference.value)


def _restore(container: Any, before: Any) -> None:
    if len(container) == len(before) and _items(container) == _items(before):
        return
    if not _is_of_a_run(container):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        container.update(before)


def _items(container: Any) -> list[Any]:
    """The ids of the items, because ``==`` on tensors does not return a bool."""
    values = [*container.keys(), *container.values()] if isinstance(container, dict) else container
    return [id(value) for value in values]


def _restore_variable(reference: Reference, before: Any) -> None:
    now = reference.read()
    if now is not before and _is_of_a_run(now):
        reference.write(before)


def _is_of_a_run(value: Any) -> bool:
    """Does ``value`` contain tensors, or sizes of a recording?"""
    leaves = [*value] if isinstance(value, set) else list(tree_iter(value))
    if isinstance(value, dict):
        leaves += [leaf for key in value for leaf in tree_iter(key)]
    return any(isinstance(leaf, Tensor | SizeInt | SizeFloat) for leaf in leaves)


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
        if any(isinstance(leaf, SizeInt | SizeFloat) for leaf in tree_iter((args, kwargs))):
            if depth:  # it is recursive, which could take exponential time without a cache
                args, kwargs = tree_map(plain, (args, kwargs))
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
