"""The emitted model: code for each stage, no weights and no devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from placer.capture import CallFormat, Conditions, TensorPath


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCode:
    """A part of a stage as a function ``forward(tree, device, inputs) -> tuple of outputs``.

    ``tree`` is any object that has the model's submodules at their original paths; ``device``
    replaces every device that tracing burned into factory calls. ``inputs`` is a list, which the
    function empties. Values are named by node. ``recompute`` and ``offload`` are those of
    `placer.regions.Region`; a piece with neither is run as it is.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    released: frozenset[str]  # inputs that nothing in the stage needs afterwards
    modules: tuple[str, ...]  # paths of the modules it calls
    attributes: tuple[str, ...]  # dotted names of the parameters and buffers it reads directly
    written: tuple[str, ...]  # names of the state that it writes
    recompute: bool
    offload: bool
    forward: Callable[..., tuple[Any, ...]]
    source: str  # the generated Python, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """One stage: pieces of code that run one after the other, most often a single one."""

    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    modules: tuple[str, ...]  # paths of the modules it calls
    attributes: tuple[str, ...]  # dotted names of the parameters and buffers it reads directly
    state: tuple[str, ...]  # names of all parameters and buffers it reads, those of modules too
    pieces: tuple[SegmentCode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """All stages of a model, and how values flow between them and the caller.

    ``graph_inputs`` are the names of the model's tensor inputs, ``written_inputs`` those that its
    forward writes in place, ``result`` the flat list of its outputs: ``("value", node name)`` or
    ``("constant", object)``; ``batched_results`` says which of them depend on the batch.
    ``state_stage`` says which stage owns each parameter and buffer; a
    parameter that later stages read too is copied there.
    """

    stages: tuple[StageCode, ...]
    graph_inputs: tuple[str, ...]
    written_inputs: frozenset[str]
    result: tuple[tuple[str, Any], ...]
    batched_results: tuple[bool, ...]
    last_use: Mapping[str, int]  # value -> the last stage that reads it
    state_stage: Mapping[str, int]
    constants: Mapping[str, torch.Tensor]
    constant_paths: Mapping[str, TensorPath]  # of those that attributes of modules hold
    call: CallFormat
    conditions: Conditions  # under which these stages are the model's program
