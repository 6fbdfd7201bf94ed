"""The generated code of a model: a function per stage, and the values that pass between stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from placer.program import CallFormat, Conditions, Path, Rows, StateInput, Stored
from placer.space import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCode:
    """Neighbouring nodes of a stage as a function ``forward(tree, device, inputs) -> tuple``.

    ``tree`` is any object with the model's submodules at their original paths. ``device`` replaces
    every device that was recorded as a constant (``torch.zeros(3, device=...)``). ``inputs`` is a
    list, which the function clears. Values have the names of the nodes that compute them.
    ``recompute`` and ``offload`` say what happens to the activations that autograd saves
    (`placer.regions.RegionKey`); with neither, they are kept on the device. ``overlapped``: offloaded
    tensors are copied while kernels run. With several ``shards``, the list begins with the tree and the
    device of every shard after the first.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    released: frozenset[str]  # inputs that nothing in the stage needs afterwards
    modules: tuple[str, ...]  # paths of the modules that it calls
    attributes: tuple[str, ...]  # paths of parameters and buffers that it reads outside of modules
    written: tuple[str, ...]  # names of the parameters and buffers that it writes
    recompute: bool
    offload: bool
    overlapped: bool
    shards: int = 1
    reads_written: bool = False  # may a gradient depend on what it writes?
    forward: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCode:
    """One stage: a sequence of segments, most often a single one."""

    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    modules: tuple[str, ...]  # paths of the modules that it calls
    attributes: tuple[str, ...]  # paths of parameters and buffers that it reads outside of modules
    state: tuple[str, ...]  # names of all parameters and buffers that it and its modules read
    segments: tuple[SegmentCode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """All stages of a model, and the values that pass between them and the caller.

    ``graph_inputs`` are the names of the call's tensors and of the ``state`` that is read besides,
    ``written_inputs`` those that forward changes in place. ``result`` is the flat list of its outputs, each
    ``("value", node)`` or ``("constant", object)``, followed by the values that forward stores, which
    ``stored`` describes. ``rows`` says how each of them depends on the rows of the batch. ``state_stage`` is
    the stage that owns each parameter and buffer: the first one that reads it. Later stages that read it get
    a copy. ``shard_of`` has the values that are on the devices of shards after the first, if the code is that
    of all shards; ``layers`` the layer of each node. ``layouts`` says how inputs are cut in space, or which
    layer reads one whole.
    """

    stages: tuple[StageCode, ...]
    graph_inputs: tuple[str, ...]
    written_inputs: frozenset[str]
    result: tuple[tuple[str, Any], ...]
    # For values of the result that are a parameter or buffer, its name
    returned_state: Mapping[str, str]
    rows: tuple[Rows, ...]
    stored: tuple[Stored, ...]
    replaced: tuple[str, ...]  # buffers that get new tensors before a call
    state: tuple[StateInput, ...]  # the last of ``graph_inputs``
    state_stage: Mapping[str, int]
    constants: Mapping[str, torch.Tensor]
    constant_paths: Mapping[str, Path]  # paths of the constants in attributes of modules
    call: CallFormat
    conditions: Conditions  # the conditions under which the stages compute what the model does
    together: bool  # is it the code of all shards?
    shard_of: Mapping[str, int]
    layers: Mapping[str, str]
    layouts: Mapping[str, Layout | str]

    def stored_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Those of the result's ``leaves`` that forward stores."""
        return leaves[len(self.call.result.names) :]

    def same_objects(
        self, leaves: Sequence[Any], inputs: Sequence[Any], model: nn.Module
    ) -> list[Any]:
        """``leaves`` of the result and of what is stored, with the very tensors that forward would give.

        Those are the call's ``inputs`` among them, parameters and buffers of ``model``, and a tensor that
        occurs several times; if they are on the devices of ``leaves``.
        """
        known: dict[Any, Any] = dict(zip(self.graph_inputs, inputs, strict=False))
        known |= {value: attrgetter(name)(model) for value, name in self.returned_state.items()}
        written: set[int] = set()  # positions of what will be copied into inputs
        position = len(self.call.result.names)
        for each in self.stored:
            if (each.root, each.kind) == ("input", "write"):
                written.add(position)
                known[self.result[position][1]] = inputs[each.path[0]]
            position += each.count
        found = []
        for index, ((kind, name), leaf) in enumerate(zip(self.result, leaves, strict=True)):
            same = leaf
            if kind == "value" and isinstance(leaf, torch.Tensor) and index not in written:
                same = known.setdefault(name, leaf)
            found.append(same if same is leaf or same.device == leaf.device else leaf)
        return found

    def example_inputs(self) -> list[torch.Tensor]:
        """Tensors on ``meta`` like the inputs that the model was captured with."""
        return [each.on_meta() for each in self.call.inputs]
