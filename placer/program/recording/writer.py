"""Write the graph of a recording, and track which node made which tensor, number or container.

Every tensor, by identity, belongs to the node that made it. A tensor that no node made is a parameter, a
buffer or a constant, and gets a ``get_attr`` node when it is first used.
"""

from __future__ import annotations

import dataclasses
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten

from placer._torch import without_torch_function
from placer.program.failure import Untraceable, locate_caller
from placer.program.fake.converter import FakeConverter
from placer.program.fake.sizes import RecordedNumber, plain
from placer.program.graphs import new_node
from placer.program.recording.inside import Inside
from placer.program.recording.operand_order import sort_operands
from placer.program.result import PLAIN
from placer.program.targets import BuildTree, get_field

CPU = torch.device("cpu")
_AS_IT_IS = frozenset((int, float, bool, str, type(None)))  # types of most arguments, asked first


class GraphWriter:
    """The graph so far, with the module path, source line and constant of each node, by node name.

    ``layer`` is the path of the module whose code is running.
    """

    def __init__(self, converter: FakeConverter, fake_model: nn.Module) -> None:
        self.converter = converter
        self.graph = fx.Graph()
        self.layer = ""
        self.layer_of: dict[str, str] = {}
        self.location_of: dict[str, str] = {}
        self.readings: dict[str, str] = {}  # single nodes that read values of inputs -> line
        self.inside: dict[str, Inside] = {}  # single nodes -> the operators that they run
        self.constants: dict[str, Tensor] = {}
        # Of the finished graph's nodes: the shape of a tensor, a number, or None.
        self.shapes: tuple[Any, ...] = ()
        # Single nodes' results that their inputs do not reach
        self.of_no_input: set[fx.Node] = set()
        # Of the finished graph's nodes: is it one of those?
        self.independent: tuple[bool, ...] = ()
        self._node_of: dict[int, fx.Node] = {}
        self._made: list[tuple[fx.Node, Tensor]] = []  # keeps the ids in _node_of valid
        self._pure: set[fx.Node] = set()
        self._taken: set[str] = set()
        self.inputs_of: dict[Any, fx.Node] = {}  # constants that became inputs -> these
        self._state = {key: name for key, (name, _) in converter.state.items()}
        self._state |= {
            id(tensor): name
            for name, tensor in (*fake_model.named_buffers(), *fake_model.named_parameters())
        }
        self._modules = {id(module): path for path, module in fake_model.named_modules() if path}
        self._attributes = {
            id(value): f"{path}.{name}".lstrip(".")
            for path, module in fake_model.named_modules()
            for name, value in module.__dict__.items()
            if isinstance(value, Tensor)
        }

    def placeholder(self, leaf_name: str, tensor: Tensor) -> None:
        """Add an input to the graph, named after ``leaf_name``."""
        self.bind(tensor, self._input(leaf_name))

    def number(self, leaf_name: str) -> fx.Node:
        """Add an input that is a number; it is erased at the end if nothing uses it."""
        node = self._input(leaf_name)
        self._pure.add(node)
        return node

    def from_state(self, constant: fx.Node, name: str) -> fx.Node:
        """Turn a constant into an input of the graph: it is read from the model in every call."""
        inputs = self.graph.find_nodes(op="placeholder")
        first = next(iter(self.graph.nodes))
        place = (
            self.graph.inserting_after(inputs[-1]) if inputs else self.graph.inserting_before(first)
        )
        with place:
            node = self._input(name)
        constant.replace_all_uses_with(node)
        self.inputs_of[constant] = node
        self.constants.pop(constant.name)
        self._made = [(node if made is constant else made, tensor) for made, tensor in self._made]
        self._node_of = {k: node if v is constant else v for k, v in self._node_of.items()}
        self.graph.erase_node(constant)
        self._pure.discard(constant)
        return node

    def tensor_of(self, node: fx.Node) -> Tensor:
        """The fake tensor that ``node`` has made."""
        return next(tensor for made, tensor in self._made if made is node)

    def _input(self, leaf_name: str) -> fx.Node:
        name = re.sub(r"\W", "_", leaf_name, flags=re.ASCII)
        if not name.isidentifier() or keyword.iskeyword(name):
            name = f"arg_{name}"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return self.graph.placeholder(name)

    def node(
        self,
        op: str,
        target: Any,
        args: Any = (),
        kwargs: Any = None,
        *,
        pure: bool = False,
        layer: str | None = None,
    ) -> fx.Node:
        """Add a node. A ``pure`` node or a ``get_attr`` is erased at the end if nothing uses it."""
        node_args, node_kwargs = self.argument(tuple(args)), self.argument(dict(kwargs or {}))
        # Temporary names, because torch takes long to derive one from the target; see `finish`.
        name = f"_{len(self.layer_of)}"
        node = new_node(self.graph, op, target, node_args, node_kwargs, name)
        if pure or op == "get_attr":
            self._pure.add(node)
        self.layer_of[node.name] = self.layer if layer is None else layer
        self.location_of[node.name] = locate_caller()
        return node

    def replace_buffers(self, values: Mapping[str, fx.Node]) -> None:
        """Record that forward replaced buffers by ``values``, by name: copy the values into the buffers.

        Nodes that read a buffer now read a copy of it, so that backward has the old values.
        """
        written = {name: self.node("get_attr", name) for name in values}
        for name, value in values.items():
            layer = name.rpartition(".")[0]
            self.node("call_method", "copy_", (written[name], value), layer=layer)
        for name in values:
            for read in self.graph.find_nodes(op="get_attr", target=name):
                if read is written[name]:
                    continue
                with self.graph.inserting_after(read):
                    kept = self.graph.call_method("clone", (read,))
                read.replace_all_uses_with(
                    kept, delete_user_cb=lambda user, kept=kept: user is not kept
                )
                self._pure.add(kept)
                self.layer_of[kept.name] = self.layer_of[read.name]

    def finish(
        self, leaves: list[Any], numbers: Mapping[fx.Node, Any], *, named: bool = True
    ) -> fx.Graph:
        """The finished graph, with ``leaves`` as its result and without unused pure nodes.

        ``numbers`` maps the nodes of sizes to their values. With ``named``, equal graphs have equal node
        names, which a graph that is only compared does not need.
        """
        self.graph.output(leaves)
        for node in reversed(self.graph.nodes):
            if node in self._pure and not node.users:
                self.graph.erase_node(node)
        sort_operands(self.graph, numbers, self.layer_of)
        with without_torch_function():
            shape_of = {node: tensor.shape for node, tensor in self._made}
        self.shapes = tuple(shape_of.get(node, numbers.get(node)) for node in self.graph.nodes)
        self.independent = tuple(node in self.of_no_input for node in self.graph.nodes)
        if not named:
            return self.graph
        self.graph.lint()
        self.graph, names = _named_anew(self.graph)
        self.layer_of = {names[k]: v for k, v in self.layer_of.items() if k in names}
        self.location_of = {names[k]: v for k, v in self.location_of.items() if k in names}
        self.readings = {names[k]: v for k, v in self.readings.items() if k in names}
        self.inside = {names[k]: v for k, v in self.inside.items() if k in names}
        self.constants = {names[k]: v for k, v in self.constants.items() if k in names}
        return self.graph

    def note_inside(self, node: fx.Node, inside: Inside | None, reading: str = "") -> None:
        """Note what a single node does inside, and the line where it decides by values of its inputs."""
        if inside is not None:
            self.inside[node.name] = inside
        if reading:
            self.readings[node.name] = reading

    # -- which node made what --------------------------------------------------------------------

    def bind(self, value: Any, node: fx.Node) -> None:
        """Note that ``node`` made every tensor in ``value``. If one occurs twice, the first place counts."""
        self._bind(value, node, set())

    def _bind(self, value: Any, node: fx.Node, bound: set[int]) -> None:
        if isinstance(value, Tensor):
            bound.add(id(value))
            self._node_of[id(value)] = node
            self._made.append((node, value))
            return
        function: Callable[..., Any] = operator.getitem
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, tuple | list):
            items = enumerate(value)
        elif dataclasses.is_dataclass(value):
            function = get_field
            items = ((x.name, getattr(value, x.name)) for x in dataclasses.fields(value))
        for key, item in items:
            if isinstance(item, Tensor | Mapping | tuple | list) or dataclasses.is_dataclass(item):
                if id(item) in bound:
                    continue
                child = self.graph.call_function(function, (node, key))
                self._pure.add(child)
                self.layer_of[child.name] = self.layer_of.get(node.name, "")
                self.location_of[child.name] = self.location_of.get(node.name, "")
                self._bind(item, child, bound)

    def makes(self, tensor: Tensor) -> bool:
        """Is there a node that made ``tensor``?"""
        return id(tensor) in self._node_of

    def first_use(self, tensor: Tensor) -> fx.Node | None:
        """A node that uses an input or parameter, or None."""
        if id(tensor) in self._node_of:
            return next(iter(self._node_of[id(tensor)].users), None)
        name = self._state.get(id(tensor))
        owner = "" if name is None else name.rpartition(".")[0]
        nodes = self.graph.find_nodes(op="get_attr", target=name or "")
        called = (
            n for n in self.graph.nodes if n.op == "call_module" and is_in(owner, str(n.target))
        )
        return next((node for node in (*nodes, *called)), None)

    def name_of_state(self, tensor: Tensor) -> str | None:
        """The name of ``tensor`` if it is a parameter or buffer of the model."""
        return self._state.get(id(tensor))

    def is_state(self, tensor: Tensor) -> bool:
        """Is ``tensor`` a parameter or buffer of the model?"""
        return id(tensor) in self._state

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made ``tensor``, or a new one that reads it from the model.

        Every use of a parameter or buffer gets a new node, so that each stage reads its own copy.
        """
        if id(tensor) in self._node_of:
            return self._node_of[id(tensor)]
        if id(tensor) in self._state:
            node = self.node("get_attr", self._state[id(tensor)])
            self._made.append((node, tensor))
            return node
        original = self.converter.original(tensor)
        if original is None:
            if type(tensor) not in (Tensor, nn.Parameter):
                raise Untraceable(
                    "it uses a tensor that code which stays whole made and did not return"
                )
            original = tensor  # a real tensor from outside the model, such as a global
        path = self._attributes.get(id(tensor), f"_constant_{len(self.constants)}")
        return self.constant(tensor, path, original)

    def constant(self, tensor: Tensor, path: str, original: Tensor) -> fx.Node:
        """A ``get_attr`` node with the target ``path`` for ``original``, whose fake copy is ``tensor``."""
        node = self.node("get_attr", path)
        self.constants[node.name] = original
        self.bind(tensor, node)
        return node

    # -- arguments -------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        """``value`` as an argument of a node: tensors and recorded numbers are replaced by their nodes.

        Raises ``Untraceable`` for an object that a graph cannot hold.
        """
        kind = type(value)
        if kind in _AS_IT_IS or kind is fx.Node:
            return value
        if kind in (tuple, list, dict, torch.Size):
            return self._container(value)
        if isinstance(value, RecordedNumber):
            return value.node if value.node.graph is self.graph else plain(value)
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, np.generic):  # some are Python numbers too, but their repr is numpy's
            return value.item()
        if isinstance(value, (*PLAIN, type(...))):
            return value
        if isinstance(value, torch.device):
            return CPU  # stands for the device of the stage: see `Program`
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, range):
            return value
        if isinstance(value, nn.Module) and id(value) in self._modules:
            path = self._modules[id(value)]
            return self.node("get_attr", path, layer=path)
        if type(value) in SUPPORTED_NODES or isinstance(value, tuple):
            leaves, spec = tree_flatten(value)
            target = BuildTree(spec, type(value))
            return self.node("call_function", target, tuple(leaves), pure=True)
        raise Untraceable(f"it passes an object of type {type(value).__qualname__} to an operation")

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        items = [self.argument(item) for item in value]
        return items if isinstance(value, list) else tuple(items)


def is_in(path: str, container: str) -> bool:
    """Is the module at ``path`` the one at ``container``, or inside it?"""
    return path == container or path.startswith(f"{container}.")


def executable(value: Any) -> Any:
    """``value`` as an argument for the run on fake tensors: plain numbers, and every device is the CPU."""
    kind = type(value)
    if kind is FakeTensor or kind in _AS_IT_IS:
        return value
    if isinstance(value, RecordedNumber):
        return plain(value)
    if isinstance(value, torch.device):
        return CPU
    if kind is tuple or kind is list:
        return kind(map(executable, value))
    if isinstance(value, torch.Size):
        return tuple(map(executable, value))
    if kind is dict:
        return {
            key: CPU if key == "device" and item is not None else executable(item)
            for key, item in value.items()
        }
    if isinstance(value, slice):
        return slice(*map(executable, (value.start, value.stop, value.step)))
    return value


def _named_anew(graph: fx.Graph) -> tuple[fx.Graph, dict[str, str]]:
    """A copy of the graph with fx's names, and a map old name -> new name.

    Names contain numbers. These must not count erased nodes, so that equal graphs always have equal names:
    how many nodes are erased differs between runs, since einops parses a pattern only once per process.
    """
    fresh = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = node.name if node.op == "placeholder" else None
        copies[node] = new_node(fresh, node.op, node.target, args, kwargs, name)
    return fresh, {old.name: new.name for old, new in copies.items()}
