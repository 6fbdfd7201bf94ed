"""What capturing a model gives: its graph, and where every node came from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from placer.program.guards import AttributeGuard, TensorPath
from placer.program.result import ResultFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModule:
    """A submodule that could not be traced into and stays one uncuttable node."""

    layer: str  # its path, "" for the model itself
    reason: str  # one sentence
    location: str  # "file.py:123" of the line that stopped the trace, "" if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How the arguments of ``forward`` become the graph's tensor inputs, and its outputs a structure.

    Arguments are bound to the signature (defaults applied) and flattened with pytree; tensor leaves
    are the graph's placeholders, in order, all other leaves are constants of the program.
    """

    signature: inspect.Signature
    in_spec: TreeSpec  # of the dict {parameter name: value}
    given: Mapping[str, bool]  # parameters that the caller gave: positionally?
    leaf_names: tuple[str, ...]  # a readable path per flattened leaf, such as "x" or "batch.0"
    constants: tuple[Any, ...]  # per flattened leaf: the non-tensor value, or TENSOR
    example_shapes: tuple[torch.Size, ...]  # per tensor leaf
    batch_size: int | None  # size(0) of the first tensor input that has a dimension
    batched: tuple[bool, ...]  # per tensor leaf: is its dim 0 the batch?
    result: ResultFormat  # of what forward returned; the graph's output is the flat list of leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a graph was captured under; under other conditions the model may be another program."""

    modes: tuple[bool, ...]  # the training flag of every module, in the order of ``modules()``
    shapes: tuple[torch.Size, ...]  # per tensor input
    dtypes: tuple[torch.dtype, ...]
    any_batch: bool  # does the graph serve every batch size?
    whole: frozenset[str]  # modules that stay whole
    guess: int  # of the values of tensors that those look at, for runs on fake tensors
    lines: tuple[str, ...]  # the graph spelled, a line per node
    locations: tuple[str, ...]  # "file.py:123" or "" of each of these lines
    guards: tuple[AttributeGuard, ...]  # the plain attributes that the program's Python code read
    ignore_device_moves: bool = False  # was the model's own choice of devices ignored?


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model as a graph on fake tensors; owns no weights (``model`` is the caller's own).

    The graph's output node returns the flat list of leaves of ``forward``'s result. A
    ``torch.device`` among a node's arguments is always ``cpu`` and stands for the device of the
    stage that runs the node, also where the program names an accelerator (`placer.program.moves`). A
    ``get_attr`` node may give a whole submodule, to a ``call_function`` node that calls it under
    ``torch.no_grad`` or ``torch.autocast`` (both are then in one ``together`` group). Sizes are
    nodes of their own and may be plain integers that cross from stage to stage. Per-node tables
    are keyed by node name; ``order`` is the order in which the program ran the nodes.
    """

    model: nn.Module
    graph: fx.Graph  # never changed after capture
    order: tuple[str, ...]  # all nodes but placeholders and output, in program order
    layer_of: Mapping[str, str]  # node -> path of the module that called it ("" = the model itself)
    state_of: Mapping[str, tuple[str, ...]]  # node -> names of the parameters and buffers it reads
    mutated_state_of: Mapping[str, tuple[str, ...]]  # node -> names of those it writes in forward
    mutated_inputs: tuple[str, ...]  # the tensor inputs that the forward writes in place
    colocated: tuple[tuple[str, ...], ...]  # groups of nodes that must share a stage
    rng_nodes: tuple[str, ...]  # nodes that draw random numbers, in program order
    constants: Mapping[str, torch.Tensor]  # get_attr node -> tensor that tracing burned in
    call: CallFormat
    whole_modules: tuple[WholeModule, ...]
    fingerprint: str  # changes when the graph, or a name, shape or dtype of the state does
    conditions: Conditions
    training: bool  # the mode that the model was in; the graph is the program of that mode
    fixed_batch: str = ""  # why only the captured batch size works, "" when every size does
    constant_paths: Mapping[str, TensorPath] = field(default_factory=dict)  # of those in attributes
    location_of: Mapping[str, str] = field(default_factory=dict)  # node -> "file.py:123" or ""
    notes: tuple[str, ...] = ()  # what the graph leaves out, in sentences


def training_flags(model: nn.Module) -> tuple[bool, ...]:
    """The mode (train or eval) of every module of ``model``."""
    return tuple(module.training for module in model.modules())


class _Tensor:
    """The mark in ``CallFormat.constants`` for a leaf that is a tensor."""

    def __repr__(self) -> str:
        return "TENSOR"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tensor:
        return self


TENSOR = _Tensor()
