"""The rows (samples) of a step, and how they are split into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from placer.errors import SpecError
from placer.program import Program, rows_of
from placer.schedule import split_batch
from placer.spec import PlacementSpec

_MICROBATCHES = (1, 2, 4, 8, 16, 32)  # the numbers tried for "auto"


def rows_of_step(program: Program, spec: PlacementSpec) -> int | None:
    """The rows of a step, as the spec says or the recorded call has; None if no input is batched."""
    return program.call.batch_size if spec.batch == "auto" else int(spec.batch)


def inputs_of_step(
    program: Program, inputs: Sequence[Tensor], batch: int | Literal["auto"] | None
) -> list[Tensor]:
    """``inputs``, of the recorded call, or others like them with ``batch`` rows, on ``meta``.

    Raises ``SpecError`` if the model was recorded for the rows that it has only.
    """
    rows, captured = program.call.batch_size, program.captured
    if batch in ("auto", None, rows):
        return list(inputs)
    reason = captured.mixing or captured.fixed_batch_reason
    if rows is None or reason:
        why = "its inputs are not split by rows" if rows is None else reason
        problem = f"a step of {batch} rows cannot be planned with this example ({why})"
        raise SpecError(SpecError.UNNAMED, [("/batch", problem, "give an example of that size")])
    return microbatch_inputs(program, inputs, int(batch))


def microbatch_choices(spec: PlacementSpec, program: Program, replicas: int) -> list[int]:
    """The numbers of micro-batches to try: the spec's, or for "auto" powers of two up to the rows."""
    if spec.microbatches != "auto":
        return [int(spec.microbatches)]
    rows = -(-(rows_of_step(program, spec) or 1) // replicas)
    return [m for m in _MICROBATCHES if m <= rows]


def microbatch_rows(
    program: Program, inputs: Sequence[Tensor], replicas: int, microbatches: int
) -> tuple[int, ...]:
    """The number of rows of each micro-batch of the first replica; ``(1,)`` if no input is batched."""
    rows = rows_of(program.call.batch_dims, [tensor.shape for tensor in inputs])
    return split_batch(1 if rows is None else rows, replicas, microbatches)[0]


def microbatch_inputs(program: Program, inputs: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The inputs of a micro-batch of so many rows, as ``meta`` tensors."""
    shaped = []
    for tensor, dim in zip(inputs, program.call.batch_dims, strict=True):
        shape = list(tensor.shape)
        if dim is not None:
            shape[dim] = rows
        meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        shaped.append(meta.requires_grad_(tensor.requires_grad))
    return shaped
