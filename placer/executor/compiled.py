"""Compiles the generated code of stages with ``torch.compile``, for the spec's ``compile``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from placer._torch import following_hooks
from placer.emit import SegmentCode

# Random numbers are those that the uncompiled code draws.
_OPTIONS: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}

# Code of a segment -> device -> the compiled code.
_known: WeakKeyDictionary[Callable[..., Any], dict[torch.device, Callable[..., Any]]] = (
    WeakKeyDictionary()
)


def compiled_forward(segment: SegmentCode, device: torch.device) -> Callable[..., tuple[Any, ...]]:
    """``segment.forward`` for ``device``, which is compiled at its first call for each kind of inputs.

    Every device has a code object of its own, because torch compiles one only so often.
    """
    found = _known.setdefault(segment.forward, {})
    if device not in found:
        given = segment.forward
        assert isinstance(given, FunctionType)
        copied = FunctionType(given.__code__.replace(), given.__globals__, given.__name__)
        compiled = torch.compile(copied, **_OPTIONS)

        def run(tree: Any, device: torch.device, inputs: list[Any]) -> tuple[Any, ...]:
            with following_hooks():
                made: tuple[Any, ...] = compiled(tree, device, inputs)
            return made

        found[device] = run
    return found[device]
