"""Record the operators that run inside a single node, to find out whether it mixes rows of the batch."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only

from placer._torch import storage_key, without_modes, without_torch_function
from placer.operands import tensors_of_tree
from placer.program.alias import written_arguments
from placer.program.failure import locate_caller
from placer.program.objects.restore import Change
from placer.program.rows.dependence import Mixing, counting_nodes, find_rows
from placer.program.state import StateNames

SOMETHING_ELSE = "it computes something else for another batch size"


class Inside:
    """A graph of the operators of one run, with the shape of each node's tensor and its source line.

    Other views of what an operator writes are computed from what it has written. ``flags`` are the flags and
    other plain values that the run has set, as text. ``state`` has the names of parameters and buffers.
    """

    def __init__(self, inputs: Any, state: StateNames) -> None:
        self.graph = fx.Graph()
        self.shapes: list[Any] = []
        self.locations: list[str] = []
        self.constants: dict[str, Tensor] = {}  # with values, such as those made from arrays
        self.results: list[fx.Node] = []
        self.flags: list[str] = []
        self._state = state
        self._node_of: dict[int, fx.Node] = {}
        self._last: dict[int, fx.Node] = {}  # storage -> the node that wrote it last, or made it
        self._views: dict[int, dict[int, Tensor]] = defaultdict(dict)  # keeps ids valid
        for tensor in tensors_of_tree(inputs):
            if id(tensor) not in self._node_of:
                self._bind(self._node("placeholder", "input", shape=tensor.shape), tensor)

    def note(self, func: Any, args: Any, kwargs: Any, value: Any) -> None:
        """An operator has run."""
        written = [args[i] if i < len(args) else kwargs.get(n) for i, n in written_arguments(func)]
        target: Any = func
        if func is torch.ops.aten.index.Tensor:
            args, target = _index(*args)
        nodes = tree_map_only(Tensor, self._read, (args, kwargs))
        shape = value.shape if isinstance(value, Tensor) else None
        node = self._node("call_function", target, *nodes, shape=shape)
        for tensor in tensors_of_tree(written):
            key = storage_key(tensor)
            for other in self._views[key]:
                self._node_of.pop(other, None)
            self._bind(node, tensor)
        if isinstance(value, Tensor):
            self._bind(node, value)
        elif isinstance(value, tuple | list):
            for i, item in enumerate(value):
                if isinstance(item, Tensor):
                    child = self._node(
                        "call_function", operator.getitem, (node, i), shape=item.shape
                    )
                    self._bind(child, item)

    def end(self, value: Any) -> None:
        """The single node returns ``value``."""
        self.results = list(map(self._read, tensors_of_tree(value)))

    def note_flags(self, changes: Iterable[Change]) -> None:
        """The run has made these changes."""
        plain = bool, int, float, str, type(None)
        self.flags = [
            f"{x.root} {x.path} = {x.value!r}" for x in changes if isinstance(x.value, plain)
        ]

    def equals(self, other: Inside | None) -> bool:
        """Has ``other`` the same operators on the same values? What no operator uses does not matter."""
        if other is None or self.flags != other.flags:
            return False
        (lines, constants), (others, other_constants) = self._used(), other._used()
        with without_modes(), without_torch_function():
            return lines == others and all(map(torch.equal, constants, other_constants))

    def _used(self) -> tuple[list[str], list[Tensor]]:
        """The operators that lead to a result or write something, as text, and the constants among them."""
        used = set(self.results)
        for node in reversed(self.graph.nodes):
            writes = hasattr(node.target, "_schema") and written_arguments(node.target)
            if writes or not used.isdisjoint(node.users):
                used.add(node)
        number = {node: i for i, node in enumerate(x for x in self.graph.nodes if x in used)}
        lines = []
        for node, shape in zip(self.graph.nodes, self.shapes, strict=True):
            if node in used:
                given = tree_map_only(fx.Node, number.get, (node.args, node.kwargs))
                lines.append(f"{node.op} {node.target} {given} {shape}")
        lines.append(str([number[node] for node in self.results]))
        return lines, [self.constants[x.name] for x in number if x.name in self.constants]

    def _node(
        self, op: str, target: Any, args: Any = (), kwargs: Any = None, *, shape: Any
    ) -> fx.Node:
        self.shapes.append(shape)
        self.locations.append(locate_caller())
        return self.graph.create_node(op, target, args, kwargs)

    def _bind(self, node: fx.Node, tensor: Tensor) -> None:
        key = storage_key(tensor)
        self._node_of[id(tensor)] = self._last[key] = node
        self._views[key][id(tensor)] = tensor

    def _read(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self._node_of:
            last = self._last.get(storage_key(tensor))
            name = next(iter(self._state.of(tensor)), "a constant")
            op, target = ("get_attr", name) if last is None else ("call_function", _view)
            args = () if last is None else (last,)
            node = self._node(op, target, args, shape=tensor.shape)
            self._node_of[id(tensor)] = node
            self._views[storage_key(tensor)][id(tensor)] = tensor
            if not isinstance(tensor, FakeTensor):
                self.constants[node.name] = tensor
        return self._node_of[id(tensor)]


def mixing_inside(
    node: str, inside: Inside, doubled: Inside, rows: int, model: nn.Module
) -> Mixing | None:
    """Where the single node ``node`` mixes rows, by its operators for the batch and for twice the batch."""
    nodes, others = list(inside.graph.nodes), list(doubled.graph.nodes)
    if [x.target for x in nodes] != [x.target for x in others]:
        return Mixing(node=node, reason=SOMETHING_ELSE)
    both = list(zip(inside.shapes, doubled.shapes, strict=True))
    dims = [
        _grown(a, b) for each, (a, b) in zip(nodes, both, strict=True) if each.op == "placeholder"
    ]
    independent = [False] * len(nodes)
    counting = counting_nodes(inside.graph, doubled.graph)
    flow = find_rows(
        *(inside.graph, inside.shapes, doubled.shapes, dims, model, independent, {}, {}, {}),
        rows=rows,
        counting=counting,
    )
    reasons = {each.node: each.reason for each in flow.mixing}
    for i, each in enumerate(nodes):
        reason = reasons.get(each.name)
        if each.name in counting and _grown(*both[i]) is not None:
            reason = reason or "it computes with the number of rows"
        if each.name in inside.constants and not _repeats(
            inside.constants[each.name], doubled.constants[others[i].name]
        ):
            reason = "it computes with numbers that depend on the number of rows"
        if each in inside.results and flow.rows[each.name].numbered:
            reason = reason or "it returns numbers of rows, which begin anew in every slice"
        if reason is not None:
            return Mixing(node=node, reason=reason, location=inside.locations[i])
    return None


def _index(x: Tensor, indices: Any) -> tuple[tuple[Any, ...], Any]:
    """``aten.index`` as ``x[index]``; by a mask, which takes elements of every row, as ``masked_select``."""
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if masks:
        return (x, *masks), torch.masked_select
    return (x, tuple(slice(None) if i is None else i for i in indices)), operator.getitem


def _view(tensor: Tensor) -> Tensor:
    """Stands for another view of what a node has written."""
    return tensor


def _grown(shape: Any, doubled: Any) -> int | None:
    """The dimension that grows with the batch."""
    if shape is None or len(shape) != len(doubled):
        return None
    return next((d for d, (a, b) in enumerate(zip(shape, doubled, strict=True)) if a != b), None)


def _repeats(constant: Tensor, doubled: Tensor) -> bool:
    """Has every slice of the batch the same constant, or the same rows of it?"""
    dim = _grown(constant.shape, doubled.shape)
    return torch.equal(constant if dim is None else torch.cat([constant] * 2, dim), doubled)
