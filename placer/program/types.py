"""What capturing a model gives, and the program that is made of it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils._pytree import TreeSpec

from placer.program.alias import Aliasing
from placer.program.fake.converter import Guess
from placer.program.guards import AttributeGuard
from placer.program.objects.paths import Path
from placer.program.result import ResultFormat
from placer.program.rows.batch import BatchDim
from placer.program.rows.dependence import Rows
from placer.program.size_log import Reading
from placer.program.stored import StateInput, Stored
from placer.spec.rewrite import Rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModule:
    """A submodule that could not be recorded operation by operation: it is a single node of the graph."""

    layer: str  # its path, "" for the model itself
    reason: str  # one sentence
    location: str  # "file.py:123" of the line that stopped the trace, "" if unknown

    @property
    def located_reason(self) -> str:
        """The reason, and the line if it is known."""
        return f"{self.reason}, {self.location}" if self.location else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor that forward is called with, as it was in the example."""

    name: str  # a readable path, such as "x" or "batch.image"
    shape: torch.Size
    dtype: torch.dtype
    batch_dim: BatchDim
    strides: tuple[int, ...]  # of a copy, if it was not contiguous

    def on_meta(self) -> torch.Tensor:
        """A tensor like it, without data."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


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
    # Per flattened leaf: the non-tensor value, TENSOR, or an ``AnyNumber`` that differs between calls
    constants: tuple[Any, ...]
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
    ignore_device_moves: bool = False  # was the model's own choice of devices ignored?
    answers: Answers = ()
    asked: frozenset[str] = frozenset()  # attributes that code looks for on inputs, which have none
    has_own_hooks: bool = False  # had the model hooks that are its own, and recorded?
    # Attributes that single nodes change, and other code reads
    read_elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What was recorded of a model in one call, before any rewrite. It owns no weights.

    ``model`` is the caller's module. The inputs of ``graph`` are the tensors of the call, then ``state``. Its
    output node returns the flat list of leaves of ``forward``'s result, and then those of the values that
    forward stores. A ``torch.device`` among a node's arguments is always ``cpu``: it stands for the device of
    the stage that runs the node, even if the model's code names an accelerator (`placer.program.moves`). A
    ``get_attr`` node may pass a whole submodule to a ``call_function`` node that calls it under
    ``torch.no_grad`` or ``torch.autocast``; the two are then on one stage. Sizes are nodes of their own,
    which stages may pass on as integers. Tables of nodes are keyed by node name.
    """

    model: nn.Module
    graph: fx.Graph  # never changed
    # Node -> path of the module whose code ran it ("": the model itself)
    layer_of: Mapping[str, str]
    aliasing: Aliasing  # which nodes of the graph share memory
    # Get_attr node -> tensor that is not a parameter or buffer
    constants: Mapping[str, torch.Tensor]
    call: CallFormat
    whole_modules: tuple[WholeModule, ...]
    fingerprint: str  # changes when the graph, or a name, shape or dtype of the state does
    conditions: Conditions
    # How each leaf of the output node depends on the rows of the batch: of the result, then of ``stored``.
    results: tuple[Rows, ...]
    # Paths of the single nodes that change attributes or variables, or differentiate: they must run once.
    changing: frozenset[str] = frozenset()
    fixed_batch_reason: str = ""  # why only the captured batch size works; "" when every size does
    # Constants in attributes.
    constant_paths: Mapping[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences that tell the user what the graph leaves out
    # Of a call whose batch is not split: why it cannot be, or "" if nothing is known against it
    mixing: str = ""
    stored: tuple[Stored, ...] = ()  # what forward leaves behind besides its result
    replaced: tuple[str, ...] = ()  # buffers that forward replaces, which the graph writes in place
    state: tuple[StateInput, ...] = ()  # the inputs after those of the call


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What is known of a node of a program.

    ``layer`` is the path of the module whose code ran it ("": the model itself). ``reads`` and ``writes`` are
    names of parameters and buffers, ``draws`` says that it draws random numbers.
    """

    layer: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    draws: bool = False


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model as a graph that is planned and run: as it was captured, or after ``rewrites``.

    ``nodes`` are all nodes but placeholders and output, by name, in the order in which they run. Made by
    `placer.program.lower`.
    """

    captured: Captured
    graph: fx.Graph  # never changed
    nodes: Mapping[str, NodeInfo]
    colocated: tuple[tuple[str, ...], ...]  # groups of nodes that must share a stage
    written_inputs: tuple[str, ...]  # names of the tensor inputs that forward changes in place
    rewrites: tuple[Rewrite, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The caller's module."""
        return self.captured.model

    @property
    def call(self) -> CallFormat:
        """The call that was captured."""
        return self.captured.call

    @functools.cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the nodes, in the order in which they run."""
        return tuple(self.nodes)

    @functools.cached_property
    def layers(self) -> Mapping[str, str]:
        """The path of the module whose code ran each node, by the node's name."""
        return {name: each.layer for name, each in self.nodes.items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of what was captured and of the rewrites, the same in every process."""
        own = self.captured.fingerprint
        if not self.rewrites:
            return own
        rewrites = json.dumps([[x.name, dict(x.settings)] for x in self.rewrites], sort_keys=True)
        return hashlib.sha256(f"{own} {rewrites}".encode()).hexdigest()


def example_numbers(call: CallFormat) -> dict[str, int | float]:
    """The numbers of the captured call among those that may be others in other calls, by name."""
    pairs = zip(call.leaf_names, call.constants, strict=True)
    return {name: c.value for name, c in pairs if isinstance(c, AnyNumber)}


def read_state(captured: Captured, rows: int | None) -> list[Any]:
    """The present values of ``captured.state`` for a slice of ``rows`` rows; numbers in the call are its own.

    Tensors may have fewer rows, if they were left by a smaller batch.
    """
    leaves = example_numbers(captured.call)
    values = [each.read(captured.model, leaves) for each in captured.state]
    return [
        value
        if each.batch_dim is None or rows is None or value.size(each.batch_dim) <= rows
        else value.narrow(each.batch_dim, 0, rows)
        for each, value in zip(captured.state, values, strict=True)
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
