"""Find out whether a captured graph is also valid for other sizes, dtypes or modes of the model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placer.program.call import bind_call, describe_shapes, objects_of, strides_of_copy
from placer.program.failure import ForwardFailure, TraceFailure, with_own_lines
from placer.program.fake.converter import FakeConverter
from placer.program.guards import AttributeGuard, failed_guard
from placer.program.recording.record import record_model, without_numbers
from placer.program.recording.recorder import Setup
from placer.program.recording.watch import RECORDING
from placer.program.types import Answers, CallFormat, Conditions
from placer.program.variable_guards import VariableGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class SameProgram:
    """The model's operations are those of the captured graph. The fields describe the new recording."""

    guards: tuple[AttributeGuard, ...]
    answers: Answers  # as in `Conditions`
    any_rows: bool  # are the operations the same for every batch size?


def condition_key(call: CallFormat, modes: tuple[bool, ...], tensors: Sequence[Tensor]) -> Hashable:
    """A key for a call: calls with equal keys and `row_counts` run the same program if the guards hold.

    It consists of modes, shapes and dtypes, without the batch size, and of the strides of tensors that are
    not contiguous in a stage either, which forward may read.
    """
    shapes = tuple(
        tensor.shape if dim is None else tensor.shape[:dim] + tensor.shape[dim + 1 :]
        for tensor, dim in zip(tensors, call.batch_dims, strict=True)
    )
    return modes, shapes, tuple(map(_strides, tensors)), tuple(tensor.dtype for tensor in tensors)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Those of its copy, which a stage gets; None if that is contiguous."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return None
    strides = strides_of_copy(tensor)
    return None if strides == torch.empty(tensor.shape, device="meta").stride() else strides


def row_counts(call: CallFormat, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The batch size of a call: the rows of each of its ``tensors`` that has any."""
    pairs = zip(tensors, call.batch_dims, strict=True)
    return tuple(tensor.size(dim) for tensor, dim in pairs if dim is not None)


def same_program(
    model: nn.Module,
    conditions: Conditions,
    captured: CallFormat,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    grad: bool = True,
    any_numbers: bool = False,
) -> SameProgram | None:
    """Record ``model`` called with these arguments; None if this is not the graph in ``conditions``.

    Numbers of which any will do are inputs again. With ``any_numbers``, others may differ, too.

    The result must have the format of the ``captured`` call too, since the same graph may end in a dict with
    other keys. This takes one forward on fake tensors; nothing is allocated. A model that is a single node
    always differs, because the node has a copy of its attributes and modes. ``grad`` is as in
    `capture_model`. Raises ``CaptureError`` if the model itself fails.
    """
    variables = [each for each in conditions.guards if isinstance(each, VariableGuard)]
    if "" in conditions.whole or failed_guard(variables, {}) is not None:
        return None
    bound = bind_call(model, args, kwargs, captured.method)
    converter = FakeConverter()
    inputs = converter.inputs(bound.tensors)
    try:
        with RECORDING:
            setup = Setup(
                converter=converter,
                model=model,
                fake_model=converter.module(model, objects_of(bound)),
                bound=bound,
                whole=conditions.whole,
                guess=conditions.guess,
                numbers=conditions.numbers,
                ignore_device_moves=conditions.ignore_device_moves,
                grad=grad,
            )
            recording = record_model(setup, inputs)
    except ForwardFailure as failure:
        raise failure.as_error(
            f"on inputs of {describe_shapes(inputs)}",
            f"the model was captured with {describe_shapes([x.shape for x in captured.inputs])}",
        ) from with_own_lines(failure.__cause__)
    except TraceFailure:
        return None
    lines, expected = recording.lines, conditions.lines
    same = lines == expected or (
        any_numbers and without_numbers(lines) == without_numbers(expected)
    )
    left = recording.stored, recording.state, recording.numbers
    if (
        not same
        or recording.result != captured.result
        or left != (conditions.stored, conditions.state, conditions.numbers)
    ):
        return None
    if recording.sizes.readings == conditions.readings:
        reads_rows = conditions.reads_rows
    else:
        reads_rows = bool(recording.sizes.readings)  # which of them depend on the rows is not known
    return SameProgram(
        guards=recording.guards,
        answers=recording.answers,
        any_rows=conditions.any_batch_size and not reads_rows,
    )
