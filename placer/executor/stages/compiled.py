"""Compiles the generated code of stages with ``torch.compile``, for the spec's ``compile``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from placer._torch import compiled_as_written
from placer.emit import SegmentCode

_log = logging.getLogger("placer")

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
        told: set[bool] = set()  # with gradients, without

        def run(tree: Any, device: torch.device, inputs: list[Any]) -> tuple[Any, ...]:
            if segment.reads_written and torch.is_grad_enabled():
                # What torch compiles computes gradients from buffers as forward left them, where it
                # read them before: https://github.com/pytorch/pytorch/pull/197039
                return segment.forward(tree, device, inputs)
            is_first = torch.is_grad_enabled() not in told
            told.add(torch.is_grad_enabled())
            if is_first:
                _tell(segment, device)
            with compiled_as_written():
                made: tuple[Any, ...] = compiled(tree, device, inputs)
            if is_first:
                _tell_of_backward(segment, device, made)
            return made

        found[device] = run
    return found[device]


def _tell(segment: SegmentCode, device: torch.device, what: str = "") -> None:
    """Log what is compiled, which may take minutes; commands print it on stderr."""
    names = dict.fromkeys((*segment.modules[:1], *segment.modules[-1:]) or segment.outputs[-1:])
    _log.info("compiling %s%s for %s …", what, " … ".join(names), device)


def _tell_of_backward(segment: SegmentCode, device: torch.device, made: tuple[Any, ...]) -> None:
    """Say the same where the backward of ``made`` begins, which is compiled then."""
    told: list[bool] = []

    def tell(gradients: Any) -> None:
        if not told:
            _tell(segment, device, "the backward of ")
        told.append(True)

    for node in {x.grad_fn for x in made if isinstance(x, torch.Tensor) and x.grad_fn is not None}:
        node.register_prehook(tell)
