"""The result of capturing a model: its graph, and the module and source line of every node."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from placer.program.batch import BatchDim
from placer.program.fake import Guess
from placer.program.guards import AttributeGuard
from placer.program.objects import Path
from placer.program.result import ResultFormat
from placer.program.rows import Rows
from placer.program.size_log import Reading
from placer.program.stored import StateInput, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModule:
    """A submodule that could not be recorded operation by operation: it is a single node of the graph."""

    layer: str  # its path, "" for the model itself
    reason: str  # one sentence
    location: str  # "file.py:123" of the line that stopped the trace, "" if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor that forward is called with, as it was in the example."""

    name: str  # a readable path, such as "x" or "batch.image"
    shape: torch.Size
    dtype: torch.dtype
    batch_dim: BatchDim


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How to flatten the arguments of ``forward``, or another method, to the graph's inputs, and its result.

    Arguments are bound to the signature (defaults applied) and flattened with pytree. Leaves that are
    tensors become the graph's placeholders, in order; all other leaves are constants of the program.
    """

    signature: inspect.Signature
    in_spec: TreeSpec  # of the dict {parameter name: value}
    positional: Mapping[str, bool]  # parameter that the caller passed -> was it positional?
    leaf_names: tuple[str, ...]  # a readable path per flattened leaf, such as "x" or "batch.0"
    constants: tuple[
        Any, ...
    ]  # per flattened leaf: the non-tensor value, TENSOR, or an ``AnyNumber`` that differs between calls
    inputs: tuple[Input, ...]  # per tensor leaf
    result: ResultFormat  # how to rebuild forward's result from the flat list of leaves
    # How the caller's marks split inputs.
    said: Mapping[str, BatchDim] = field(default_factory=dict)
    method: str = "forward"  # of the model, which is called

    @property
    def batch_dims(self) -> tuple[BatchDim, ...]:
        """The dimension of the batch, per tensor leaf."""
        return tuple(each.batch_dim for each in self.inputs)

    @property
    def batch_size(self) -> int | None:
        """The number of rows of the example; None if no input has a row per sample."""
        return rows_of(self.batch_dims, [each.shape for each in self.inputs])


# The answers to what forward asked about gradients: whether they are enabled, and `requires_grad` of every
# input of the call and every parameter. Empty, or just the first, if forward asked no more.
Answers: TypeAlias = tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a capture. Under other conditions, the model may run other operations."""

    modes: tuple[bool, ...]  # the training flag of every module, in the order of ``modules()``
    any_batch_size: bool  # is the graph the same for twice the batch?
    reads_rows: bool  # might the graph differ for a third batch size?
    readings: tuple[Reading, ...]  # where Python code read sizes
    whole: frozenset[str]  # paths of the modules that are a single node
    guess: Guess  # what these modules get where they read values of fake tensors
    lines: tuple[str, ...]  # the graph as text, a line per node
    guards: tuple[AttributeGuard, ...]  # the plain attributes that the program's Python code read
    stored: tuple[Stored, ...]  # what forward leaves behind
    state: tuple[StateInput, ...]  # inputs that are not tensors of the call
    numbers: tuple[StateInput, ...]  # numbers of which any will do
    # By name, the numbers among the call's ``AnyNumber`` leaves of which only this one will do:
    fixed: Mapping[str, int | float]
    repeats: bool  # does a call compute the same in the state that a call leaves?
    ignore_device_moves: bool = False  # was the model's own choice of devices ignored?
    answers: Answers = ()
    hooked_by_forward: bool = False  # had forward itself installed hooks on the model?


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model as an ``fx`` graph. It owns no weights: ``model`` is the caller's module.

    The graph's inputs are the tensors of the call, then ``state``. Its output node returns the flat list of
    leaves of ``forward``'s result, and then those of the values that forward stores. A ``torch.device`` among
    a node's arguments is always ``cpu``: it stands for the device of the stage that runs the node, even if
    the model's code names an accelerator (`placer.program.moves`). A ``get_attr`` node may pass a whole
    submodule to a ``call_function`` node that calls it under ``torch.no_grad`` or ``torch.autocast``; the two
    are then in one ``colocated`` group. Sizes are nodes of their own, which stages may pass on as integers.
    Tables of nodes are keyed by node name.
    """

    model: nn.Module
    graph: fx.Graph  # never changed after capture
    order: tuple[str, ...]  # all nodes but placeholders and output, in the order in which they ran
    # Node -> path of the module whose code ran it ("": the model itself)
    layer_of: Mapping[str, str]
    state_of: Mapping[str, tuple[str, ...]]  # node -> names of the parameters and buffers it reads
    mutated_state_of: Mapping[
        str, tuple[str, ...]
    ]  # node -> names of the state that it writes in forward
    mutated_inputs: tuple[str, ...]  # names of the tensor inputs that forward changes in place
    colocated: tuple[tuple[str, ...], ...]  # groups of nodes that must share a stage
    rng_nodes: tuple[str, ...]  # nodes that draw random numbers, in program order
    constants: Mapping[
        str, torch.Tensor
    ]  # get_attr node -> tensor that is not a parameter or buffer
    call: CallFormat
    whole_modules: tuple[WholeModule, ...]
    fingerprint: str  # changes when the graph, or a name, shape or dtype of the state does
    conditions: Conditions
    # How each leaf of the output node depends on the rows of the batch: of the result, then of ``stored``.
    results: tuple[Rows, ...]
    # Paths of the single nodes that change attributes or variables, so that they must run once.
    changing: frozenset[str] = frozenset()
    fixed_batch_reason: str = ""  # why only the captured batch size works; "" when every size does
    # Constants in attributes.
    constant_paths: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences that tell the user what the graph leaves out
    stored: tuple[Stored, ...] = ()  # what forward leaves behind besides its result
    state: tuple[StateInput, ...] = ()  # the inputs after those of the call


def example_numbers(call: CallFormat) -> dict[str, int | float]:
    """The numbers of the captured call among those that may be others in other calls, by name."""
    pairs = zip(call.leaf_names, call.constants, strict=True)
    return {name: c.value for name, c in pairs if isinstance(c, AnyNumber)}


def read_state(program: Program, rows: int | None) -> list[Any]:
    """The present values of ``program.state`` for a slice of ``rows`` rows; numbers in the call are its own.

    Tensors may have fewer rows, if they were left by a smaller batch.
    """
    leaves = example_numbers(program.call)
    values = [each.read(program.model, leaves) for each in program.state]
    return [
        value
        if each.batch_dim is None or rows is None or value.size(each.batch_dim) <= rows
        else value.narrow(each.batch_dim, 0, rows)
        for each, value in zip(program.state, values, strict=True)
    ]


def rows_of(dims: Sequence[BatchDim], shapes: Sequence[torch.Size]) -> int | None:
    """The size of the batch: that of the first shape along its dimension; None if there is no batch."""
    sizes = (shape[dim] for shape, dim in zip(shapes, dims, strict=True) if dim is not None)
    return next(sizes, None)


def training_flags(model: nn.Module) -> tuple[bool, ...]:
    """The ``training`` flag of every module, in the order of ``model.modules()``."""
    return tuple(module.training for module in model.modules())


@dataclass(frozen=True, slots=True)
class AnyNumber:
    """Marks a leaf in ``CallFormat.constants`` that may be any number; ``value`` is an example."""

    kind: type
    value: int | float = field(compare=False)


class _Tensor:
    """The type of ``TENSOR``, which marks tensor leaves in ``CallFormat.constants``."""

    def __repr__(self) -> str:
        return "TENSOR"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tensor:
        return self


TENSOR = _Tensor()
