"""Is a captured graph the model's program under other conditions too: other sizes, another mode?"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placer.program.call import bind_call, describe_shapes
from placer.program.failure import ForwardFailure, TraceFailure
from placer.program.fake import FakeConverter
from placer.program.fingerprint import graph_lines
from placer.program.guards import AttributeGuard
from placer.program.record import record_model
from placer.program.types import CallFormat, Conditions
from placer.program.watch import RECORDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where the program first becomes another one: the line of code and the operation there."""

    location: str  # "file.py:123", "" if unknown
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SameProgram:
    """It does not; ``guards`` are the plain attributes that this time were read."""

    guards: tuple[AttributeGuard, ...]


def condition_key(
    conditions: Conditions, call: CallFormat, modes: tuple[bool, ...], tensors: Sequence[Tensor]
) -> Hashable:
    """What the program may depend on: equal keys, the same program.

    Modes, dtypes and sizes; the size of the batch only where recording found that it matters.
    """
    shapes = tuple(
        tensor.shape[1:] if batched and conditions.any_batch else tensor.shape
        for tensor, batched in zip(tensors, call.batched, strict=True)
    )
    return modes, shapes, tuple(tensor.dtype for tensor in tensors)


def captured_key(conditions: Conditions, call: CallFormat) -> Hashable:
    """The `condition_key` of the captured call itself."""
    tensors = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(conditions.shapes, conditions.dtypes, strict=True)
    ]
    return condition_key(conditions, call, conditions.modes, tensors)


def find_difference(
    model: nn.Module,
    conditions: Conditions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Difference | SameProgram:
    """Record ``model`` called with these arguments, on fake tensors, and compare the programs.

    One recording (a forward on fake tensors); nothing is
    allocated. Raises ``CaptureError`` when the model itself fails.
    """
    bound = bind_call(model, args, kwargs)
    converter = FakeConverter()
    inputs = [converter.tensor(tensor) for tensor in bound.tensors]
    try:
        with RECORDING:
            recording = record_model(
                converter,
                model,
                converter.module(model),
                bound,
                inputs,
                conditions.whole,
                guess=conditions.guess,
                ignore_device_moves=conditions.ignore_device_moves,
            )
    except ForwardFailure as failure:
        raise failure.as_error(
            f"on inputs of {describe_shapes(inputs)}",
            f"the model was captured with {describe_shapes(conditions.shapes)}",
        ) from failure.__cause__
    except TraceFailure as failure:
        return Difference(location=failure.location, operation=failure.reason)
    nodes = list(recording.graph.nodes)
    spelled = graph_lines(recording.graph)
    for index, (was, now) in enumerate(zip(conditions.lines, spelled, strict=False)):
        if was != now:
            location = conditions.locations[index] or recording.location_of.get(
                nodes[index].name, ""
            )
            return Difference(location=location, operation=nodes[index].name)
    if len(spelled) != len(conditions.lines):
        return Difference(location="", operation=nodes[-1].name)
    return SameProgram(guards=recording.guards)
