"""A graph of a single node for a model whose own ``forward`` cannot be recorded."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer._torch import HOOK_TABLES
from placer.program.call import BoundCall, placeholder_names, rebuild_call
from placer.program.copying import copy_module
from placer.program.failure import ForwardFailure, locate
from placer.program.fake import FakeConverter, GuessData
from placer.program.guards import make_guards, watch_attributes
from placer.program.record import RecordedProgram, recording_modes
from placer.program.restore import Snapshot, module_roots
from placer.program.result import flatten_result
from placer.program.size_log import SizeLog
from placer.program.state import named_state
from placer.program.targets import WholeRoot
from placer.program.writer import GraphWriter


def record_whole(
    converter: FakeConverter,
    model: nn.Module,
    fake_model: nn.Module,
    bound: BoundCall,
    inputs: Sequence[Tensor],
    *,
    guess: int,
) -> RecordedProgram:
    """A graph that calls all of ``model`` in one node, a function of its parameters, buffers and inputs.

    Raises ``ForwardFailure`` if the model itself fails.
    """
    snapshot = Snapshot(module_roots(fake_model))
    guesses = GuessData(converter.mode, guess)
    attributes: set[tuple[str, str]] = set()

    def read(path: str, name: str) -> None:
        attributes.add((path, name))

    try:
        with (
            recording_modes(converter),
            guesses,
            watch_attributes(dict(fake_model.named_modules()), read),
        ):
            args, kwargs = rebuild_call(bound, inputs)
            leaves, result = flatten_result(fake_model.forward(*args, **kwargs))
    except Exception as error:
        raise ForwardFailure("", locate(error), guessed=guesses.guessed) from error
    finally:
        snapshot.restore()
    writer = GraphWriter(converter, fake_model)
    for name, tensor in zip(placeholder_names(bound), inputs, strict=True):
        writer.placeholder(name, tensor)
    names = [name for name, _ in named_state(model)]
    state = [writer.node("get_attr", name) for name in names]
    form = replace(bound, leaves=bound.constants)  # keeps no tensor of the caller's
    call = WholeRoot(_skeleton(model), tuple(names), partial(rebuild_call, form))
    node = writer.node("call_function", call, (*state, *inputs))
    graph = writer.finish(
        [
            writer.node("call_function", operator.getitem, (node, i))
            if isinstance(leaf, Tensor | int | float)
            else leaf
            for i, leaf in enumerate(leaves)
        ],
        {},
    )
    return RecordedProgram(
        graph=graph,
        layer_of=dict.fromkeys(writer.layer_of, ""),
        location_of=dict.fromkeys(writer.location_of, ""),
        constants={},
        result=result,
        results=tuple(x.shape if isinstance(x, Tensor) else x for x in leaves),
        side_effects=(),
        guards=make_guards(model, attributes),
        checkpointed={},
        grad=None,
        sizes=SizeLog(),
    )


def _skeleton(model: nn.Module) -> nn.Module:
    """``model`` with its tensors on ``meta`` and without its own hooks, which run around the node."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    skeleton = copy_module(model, memo)
    for name in HOOK_TABLES:
        getattr(skeleton, name).clear()
    return skeleton
