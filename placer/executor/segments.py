"""Run a stage segment by segment: as it is, recomputed in backward, or with its activations on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from placer._torch import is_transformed
from placer.emit import SegmentCode, StageCode
from placer.executor.offload import offload_saved
from placer.executor.place import Place, on


def run_segments(stage: StageCode, tree: Any, place: Place, inputs: list[Any]) -> tuple[Any, ...]:
    """The outputs of ``stage`` for ``inputs``, which are on ``place`` already; the list is emptied.

    A value is dropped after its last reader. Where no gradients are recorded every segment is run as
    it is, and so it is under ``torch.func``, which allows no saved-tensor hooks.
    """
    if len(stage.segments) == 1 and stage.segments[0].inputs == stage.inputs:
        (segment,) = stage.segments
        if segment.outputs == stage.outputs:
            return _run(segment, tree, place, inputs)
    values = dict(zip(stage.inputs, inputs, strict=True))
    inputs.clear()
    for segment in stage.segments:
        arguments = [
            values.pop(name) if name in segment.released else values[name]
            for name in segment.inputs
        ]
        values.update(zip(segment.outputs, _run(segment, tree, place, arguments), strict=True))
    return tuple(values[name] for name in stage.outputs)


def _run(segment: SegmentCode, tree: Any, place: Place, inputs: list[Any]) -> tuple[Any, ...]:
    if not torch.is_grad_enabled() or is_transformed():
        return segment.forward(tree, place.device, inputs)
    waiting: AbstractContextManager[Any] = nullcontext()
    if segment.offload:
        waiting = offload_saved(_state(segment, tree), place, overlapped=segment.overlapped)
    with waiting:
        if segment.recompute:
            return _run_recomputed(segment, tree, place, inputs)
        return segment.forward(tree, place.device, inputs)


def _run_recomputed(
    segment: SegmentCode, tree: Any, place: Place, inputs: list[Any]
) -> tuple[Any, ...]:
    """Run the segment so that only its inputs are kept, and run it again when backward needs more.

    The second run has the first one's random numbers and autocast. State that the segment writes is
    written once: the second run works on copies of what the first one found.
    """
    found = {name: tensor.detach().clone() for name, tensor in tensors_at(tree, segment.written)}
    runs = 0

    def run(*arguments: Any) -> tuple[Any, ...]:
        nonlocal runs
        runs += 1
        with on(place), _swapped(tree, found) if runs > 1 else nullcontext():
            return segment.forward(tree, place.device, list(arguments))

    arguments = tuple(inputs)
    inputs.clear()
    outputs: tuple[Any, ...] = checkpoint(run, *arguments, use_reentrant=False)
    return outputs


@contextmanager
def _swapped(tree: Any, found: Mapping[str, Tensor]) -> Iterator[None]:
    """Have ``tree`` hold copies of ``found`` in this block."""
    tables = [(*_table(tree, name), value) for name, value in found.items()]
    held = [table[leaf] for table, leaf, _ in tables]
    for table, leaf, value in tables:
        table[leaf] = value.clone()
    try:
        yield
    finally:
        for (table, leaf, _), tensor in zip(tables, held, strict=True):
            table[leaf] = tensor


def tensors_at(tree: Any, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        table, leaf = _table(tree, name)
        yield name, table[leaf]


def _table(tree: Any, name: str) -> tuple[dict[str, Any], str]:
    """Where ``tree`` (of modules or stand-ins) holds the tensor called ``name``, and its key there."""
    owner, _, leaf = name.rpartition(".")
    value = tree
    for part in owner.split(".") if owner else ():
        value = getattr(value, part)
    tables = (value._buffers, value._parameters) if isinstance(value, nn.Module) else ()
    return next((table for table in tables if leaf in table), vars(value)), leaf


def _state(segment: SegmentCode, tree: Any) -> Iterator[Tensor]:
    """The weights that the segment reads: they stay where they are."""
    for path in segment.modules:
        module = tree
        for part in path.split("."):
            module = getattr(module, part)
        yield from _all_tensors(module)
    for _, tensor in tensors_at(tree, segment.attributes):
        if isinstance(tensor, Tensor):
            yield tensor


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)
