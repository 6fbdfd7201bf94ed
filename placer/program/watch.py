"""Reports calls of modules and of custom autograd functions, and seeding, while a model runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

# Recording replaces functions of torch for the whole process: one thread may do that at a time.
RECORDING = threading.RLock()


class Watcher(Protocol):
    """Who is told; while ``paused`` is true, calls go through unreported."""

    paused: bool

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """``original(module, *args, **kwargs)`` is wanted."""

    def apply(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        """``original(*args, **kwargs)``, which is ``cls.apply``, is wanted."""

    def seed(self) -> None:
        """The state of torch's generator is about to be set."""


@contextmanager
def watch_calls(watcher: Watcher) -> Iterator[None]:
    """Calls of modules and ``autograd.Function.apply`` in this thread go to ``watcher``.

    It also hears when ``torch.manual_seed``, ``torch.random.fork_rng`` and the like set the state of
    torch's generator. To be entered under the lock `RECORDING`.
    """
    thread = threading.get_ident()
    original_call = nn.Module.__call__
    original_apply = torch.autograd.Function.__dict__["apply"]

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if watcher.paused or threading.get_ident() != thread:
            return original_call(module, *args, **kwargs)
        return watcher.call(original_call, module, args, kwargs)

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = original_apply.__get__(None, cls)
        if watcher.paused or threading.get_ident() != thread:
            return original(*args, **kwargs)
        return watcher.apply(original, cls, args, kwargs)

    class Generator:
        """Torch's own generator, to the functions of ``torch.random``."""

        def __getattr__(self, name: str) -> Any:
            sets = name in ("manual_seed", "seed", "set_state")
            if sets and not watcher.paused and threading.get_ident() == thread:
                watcher.seed()
            return getattr(torch.default_generator, name)

    nn.Module.__call__ = module_call  # type: ignore[method-assign]
    torch.random.default_generator = Generator()  # type: ignore[assignment, attr-defined]
    torch.autograd.Function.apply = classmethod(function_apply)
    try:
        yield
    finally:
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = original_apply
        torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]
