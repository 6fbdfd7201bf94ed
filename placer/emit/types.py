"""The emitted model: code for each stage, no weights and no devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from placer.capture import CallFormat, Conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """One stage as a function ``forward(tree, device, *inputs) -> tuple of outputs``.

    ``tree`` is any object that has the model's submodules at their original paths; ``device``
    replaces every device that tracing burned into factory calls. Values are named by node.
    """

    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    modules: tuple[str, ...]  # paths of the modules it calls
    attributes: tuple[str, ...]  # dotted names of the parameters and buffers it reads directly
    state: tuple[str, ...]  # names of all parameters and buffers it reads, those of modules too
    forward: Callable[..., tuple[Any, ...]]
    source: str  # the generated Python, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """All stages of a model, and how values flow between them and the caller.

    ``graph_inputs`` are the names of the model's tensor inputs, ``result`` the flat list of its
    outputs: ``("value", node name)`` or ``("constant", object)``. ``state_stage`` says which stage
    owns each parameter and buffer; a parameter that later stages read too is mirrored there.
    """

    stages: tuple[StageCode, ...]
    graph_inputs: tuple[str, ...]
    result: tuple[tuple[str, Any], ...]
    last_use: Mapping[str, int]  # value -> the last stage that reads it
    state_stage: Mapping[str, int]
    constants: Mapping[str, torch.Tensor]
    call: CallFormat
    conditions: Conditions  # under which these stages are the model's program
