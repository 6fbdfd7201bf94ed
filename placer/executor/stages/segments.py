"""Runs a stage segment by segment; some segments are recomputed in backward or offload activations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from placer._torch import (
    function_modes,
    is_checkpointing,
    is_transformed,
    saved_tensor_hooks,
)
from placer.emit import SegmentCode, StageCode
from placer.errors import PlacerError
from placer.executor.places.place import Place, on
from placer.executor.stages.compiled import compiled_forward
from placer.executor.stages.offload import offload_saved
from placer.executor.stages.segment_state import SegmentState, tensors_read
from placer.generators import random_state, set_random_state
from placer.space import Exchange, exchanging

_CPU = torch.device("cpu")

# Held while backward recomputes a segment, and while it takes one of the recomputed tensors. Backward
# runs in a thread per device: several of them may want tensors of one segment that is split in space, and
# all draw from the one generator of the CPU. Reentrant, because a thread that waits for an inner backward may
# run another recomputation.
_recomputing = threading.RLock()

_TENSOR = object()  # where a tensor belongs among the inputs of a segment


def run_segments(
    stage: StageCode,
    trees: Sequence[Any],
    places: Sequence[Place],
    inputs: list[Any],
    exchange: Exchange | None = None,
    *,
    compiled: bool = False,
) -> tuple[Any, ...]:
    """The outputs of ``stage`` for ``inputs``, which must be on its place; the list is emptied.

    ``trees`` and ``places`` are those of the shards that run here, most often one. Operations in space use
    ``exchange``. A value is freed after its last reader. Without gradients nothing is recomputed or
    offloaded, nor under ``torch.func``, which does not allow saved-tensor hooks.
    """
    if len(stage.segments) == 1 and stage.segments[0].inputs == stage.inputs:
        (segment,) = stage.segments
        if segment.outputs == stage.outputs:
            return _run(segment, trees, places, inputs, exchange, compiled)
    values = dict(zip(stage.inputs, inputs, strict=True))
    inputs.clear()
    for segment in stage.segments:
        arguments = [
            values.pop(name) if name in segment.released else values[name]
            for name in segment.inputs
        ]
        made = _run(segment, trees, places, arguments, exchange, compiled)
        values.update(zip(segment.outputs, made, strict=True))
        del made
    return tuple(values[name] for name in stage.outputs)


def _run(
    segment: SegmentCode,
    trees: Sequence[Any],
    places: Sequence[Place],
    inputs: list[Any],
    exchange: Exchange | None,
    compiled: bool,
) -> tuple[Any, ...]:
    tree, place = trees[0], places[0]
    compiled = compiled and not is_transformed()
    forward = compiled_forward(segment, place.device) if compiled else segment.forward
    if exchange is not None and is_transformed():
        raise PlacerError(
            "torch.func",
            "transforms a model that is split in space, whose parts it cannot follow",
            'leave out "space" for it, or use backward()',
        )
    if segment.shards > 1:
        further = zip(trees[1 : segment.shards], places[1 : segment.shards], strict=True)
        inputs[:0] = [x for own, there in further for x in (own, there.device)]
    if not torch.is_grad_enabled() or is_transformed():
        with exchanging(exchange):
            return forward(tree, place.device, inputs)
    offloading: AbstractContextManager[Any] = nullcontext()
    if segment.offload and not is_checkpointing(saved_tensor_hooks()):
        # A caller's checkpoint saves nothing, but would see no tensor past our hooks, and not run again.
        kept = (each for own in trees[: segment.shards] for each in tensors_read(segment, own))
        local = places[: segment.shards]
        offloading = offload_saved(kept, local, overlapped=segment.overlapped)
    with offloading:
        if segment.recompute:
            return _run_recomputed(segment, forward, tree, places, inputs, exchange)
        with exchanging(exchange):
            return forward(tree, place.device, inputs)


def _run_recomputed(
    segment: SegmentCode,
    forward: Callable[..., tuple[Any, ...]],
    tree: Any,
    places: Sequence[Place],
    inputs: list[Any],
    exchange: Exchange | None,
) -> tuple[Any, ...]:
    """Run the segment under ``torch.utils.checkpoint``, so that backward runs it again.

    The second run uses the same random states and modes of torch, and the same `SegmentState`. Buffers and
    parameters that the segment writes are written once: the second run works on copies of their values before
    the first.

    ``checkpoint`` can restore random states too, but several threads that do so at once leave the CPU's
    generator in the state of one of the recomputations. Nor may several take tensors of one segment at once:
    each would run it again.
    """
    before = SegmentState(segment, tree)
    place = places[0]
    states = {device: random_state(device) for device in (_CPU, *(p.device for p in places))}
    modes = function_modes()
    # Checkpoint saves tensors for its backward, so that they can be offloaded, and maps over all that it is
    # given, which torch 2.11 cannot do with packed sequences.
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    others = [_TENSOR if isinstance(x, Tensor) else x for x in inputs]
    inputs.clear()
    runs = 0

    def run(*tensors: Tensor) -> tuple[Any, ...]:
        nonlocal runs
        runs += 1
        with ExitStack() as stack:
            stack.enter_context(on(place))
            stack.enter_context(exchanging(exchange))
            if runs > 1:
                for mode in modes:
                    stack.enter_context(mode)
                stack.enter_context(_random_states_swapped(states))
                stack.enter_context(before.restored())
            else:
                pack, unpack = saved_tensor_hooks()
                stack.enter_context(saved_tensors_hooks(pack, partial(_unpack, unpack)))
            given = iter(tensors)
            arguments = [next(given) if x is _TENSOR else x for x in others]
            found = forward(tree, place.device, arguments)
            if runs == 1:
                before.has_run()
            return found

    outputs: tuple[Any, ...] = checkpoint(
        run, *tensors, use_reentrant=False, preserve_rng_state=False
    )
    return outputs


def _unpack(unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    with _recomputing:
        return unpack(saved)


@contextmanager
def _random_states_swapped(states: Mapping[torch.device, Tensor]) -> Iterator[None]:
    """In this block, random numbers are drawn from ``states``."""
    held = {device: random_state(device) for device in states}
    for device, state in states.items():
        set_random_state(device, state)
    try:
        yield
    finally:
        for device, state in held.items():
            set_random_state(device, state)
