"""Intercept calls of modules and autograd functions, seeding, and `torch.is_grad_enabled`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Protocol

from torch import nn

from placer._torch_patches import (
    call_before_seeding,
    override_calls,
    override_function_forwards,
    override_grad_enabled,
    override_script_functions,
)

# Recording patches torch for the whole process, so only one thread may record at a time.
RECORDING = threading.RLock()


class Watcher(Protocol):
    """Handles intercepted calls; while ``paused`` is true, nothing is intercepted."""

    paused: bool

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result for ``original(module, *args, **kwargs)``, a call of ``module``."""

    def apply(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        """Return the result for ``original(*args, **kwargs)``, where ``original`` is ``cls.apply``."""

    def apply_by_alias(self, forward: Callable[..., Any], cls: Any, args: Any) -> Any:
        """Return the result of ``forward(*args)``, which an alias of ``cls.apply`` has called.

        The first of ``args`` may be a context. Gradients are disabled, as always in such a forward.
        """

    def call_script(
        self, original: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Return the result for ``original(function, ...)``, a call of a function of TorchScript."""

    def seed(self) -> None:
        """Called before the state of torch's generator is set."""

    def grad_enabled(self) -> bool:
        """The answer for code of the model that asks whether gradients are enabled."""


def runs_library(frame: FrameType) -> bool:
    """Does ``frame`` run code of torch or placer?"""
    return str(frame.f_globals.get("__name__", "")).startswith(("torch.", "placer."))


def trace_codes(
    codes: dict[int, CodeType], again: dict[int, CodeType], recomputes: Callable[[], bool]
) -> Callable[[FrameType, Any, Any], Any]:
    """A function for `sys.settrace` that adds the codes of functions that are called to ``codes``, by id.

    Those that are called while ``recomputes()``, it adds to ``again``, too. It calls the present function,
    such as a debugger's, too.
    """
    present = sys.gettrace()

    def trace(frame: FrameType, event: Any, arg: Any) -> Any:
        codes[id(frame.f_code)] = frame.f_code
        if recomputes():
            again[id(frame.f_code)] = frame.f_code
        return present(frame, event, arg) if present is not None else None

    return trace


@contextmanager
def watch_calls(watcher: Watcher) -> Iterator[None]:
    """In this block, ``watcher`` handles calls of modules, of ``autograd.Function.apply`` and of TorchScript.

    Only calls in this thread are handled.

    Its ``seed`` is called when ``torch.manual_seed``, ``torch.random.fork_rng`` and the like set the
    state of torch's generator, and its ``grad_enabled`` answers ``torch.is_grad_enabled()`` in code
    that is neither torch's nor placer's. Hold the lock `RECORDING` around the block.
    """
    thread = threading.get_ident()

    def is_watched() -> bool:
        return not watcher.paused and threading.get_ident() == thread

    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_watched():
            return watcher.call(original, module, args, kwargs)
        return original(module, *args, **kwargs)

    def apply(original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        if is_watched():
            return watcher.apply(original, cls, args, kwargs)
        return original(*args, **kwargs)

    def forward(original: Callable[..., Any], cls: Any, args: Any) -> Any:
        return watcher.apply_by_alias(original, cls, args) if is_watched() else original(*args)

    def call_script(original: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        if is_watched():
            return watcher.call_script(original, function, args, kwargs)
        return original(function, *args, **kwargs)

    def seed() -> None:
        if is_watched():
            watcher.seed()

    def grad_enabled(original: Callable[[], bool]) -> bool:
        if runs_library(sys._getframe(2)) or not is_watched():
            return original()
        return original() and watcher.grad_enabled()

    with (
        override_calls(call=call, apply=apply),
        override_function_forwards(forward),
        override_script_functions(call_script),
        override_grad_enabled(grad_enabled),
        call_before_seeding(seed),
    ):
        yield
