"""Intercept calls of modules and autograd functions, seeding, and `torch.is_grad_enabled`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

# Recording patches torch for the whole process, so only one thread may record at a time.
RECORDING = threading.RLock()


class Watcher(Protocol):
    """Handles intercepted calls; while ``paused`` is true, nothing is intercepted."""

    paused: bool

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result for ``original(module, *args, **kwargs)``, a call of ``module``."""

    def apply(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        """Return the result for ``original(*args, **kwargs)``, where ``original`` is ``cls.apply``."""

    def seed(self) -> None:
        """Called before the state of torch's generator is set."""

    def grad_enabled(self) -> bool:
        """The answer for code of the model that asks whether gradients are enabled."""


@contextmanager
def watch_calls(watcher: Watcher) -> Iterator[None]:
    """In this block, ``watcher`` handles calls of modules and ``autograd.Function.apply`` in this thread.

    Its ``seed`` is called when ``torch.manual_seed``, ``torch.random.fork_rng`` and the like set the
    state of torch's generator, and its ``grad_enabled`` answers ``torch.is_grad_enabled()`` in code
    that is neither torch's nor placer's. Hold the lock `RECORDING` around the block.
    """
    thread = threading.get_ident()
    original_call = nn.Module.__call__
    original_apply = torch.autograd.Function.__dict__["apply"]
    original_enabled = torch.is_grad_enabled

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if watcher.paused or threading.get_ident() != thread:
            return original_call(module, *args, **kwargs)
        return watcher.call(original_call, module, args, kwargs)

    def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = original_apply.__get__(None, cls)
        if watcher.paused or threading.get_ident() != thread:
            return original(*args, **kwargs)
        return watcher.apply(original, cls, args, kwargs)

    def grad_enabled() -> bool:
        asked_by = str(sys._getframe(1).f_globals.get("__name__", ""))
        own = asked_by.startswith(("torch.", "placer."))
        if own or watcher.paused or threading.get_ident() != thread:
            return original_enabled()
        return original_enabled() and watcher.grad_enabled()

    class Generator:
        """A proxy for torch's default generator that reports seeding."""

        def __getattr__(self, name: str) -> Any:
            sets = name in ("manual_seed", "seed", "set_state")
            if sets and not watcher.paused and threading.get_ident() == thread:
                watcher.seed()
            return getattr(torch.default_generator, name)

    nn.Module.__call__ = module_call  # type: ignore[method-assign]
    torch.random.default_generator = Generator()  # type: ignore[assignment, attr-defined]
    torch.autograd.Function.apply = classmethod(function_apply)
    torch.is_grad_enabled = grad_enabled
    try:
        yield
    finally:
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = original_apply
        torch.is_grad_enabled = original_enabled
        torch.random.default_generator = torch.default_generator  # type: ignore[attr-defined]
