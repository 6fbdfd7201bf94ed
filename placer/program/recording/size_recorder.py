"""Record the sizes of tensors, and arithmetic on them, as nodes of the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from placer.program.fake.sizes import InputFloat, InputInt, SizeFloat, SizeInt, plain
from placer.program.recording.writer import GraphWriter, executable
from placer.program.size_log import Reading, SizeLog


class SizeRecorder:
    """Writes nodes for sizes. ``values`` maps each such node to its value in this run."""

    def __init__(self, writer: GraphWriter, is_paused: Callable[[], bool]) -> None:
        self.values: dict[fx.Node, Any] = {}
        self._readings: list[tuple[str, str, tuple[Any, ...], bool | None]] = []
        self._writer = writer
        self._is_paused = is_paused  # inside a single node: nothing is recorded
        # (node of a tensor, method such as "size", dimension) -> the node of that size
        self._nodes: dict[tuple[fx.Node, str, Any], fx.Node] = {}

    def shape(self, tensor: Tensor, shape: torch.Size) -> torch.Size:
        """The tensor's ``shape`` with recorded sizes."""
        return torch.Size([self._dimension(tensor, "size", i, n) for i, n in enumerate(shape)])

    def size(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a method such as ``size`` or ``numel``, with recorded sizes."""
        tensor = args[0]
        value = func(*executable(args), **executable(kwargs))
        if name == "__len__":  # Python turns it into a plain number
            self.note_reading("len", (self._dimension(tensor, "size", 0, value),), None)
            return value
        if isinstance(value, torch.Size):
            return self.shape(tensor, value)
        if isinstance(value, tuple):
            return tuple(self._dimension(tensor, name, i, n) for i, n in enumerate(value))
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dim = dim % tensor.dim() if isinstance(dim, int) and tensor.dim() else None
        return self._dimension(tensor, name, dim, value)

    def input(self, node: fx.Node, value: float) -> Any:
        """A number that is an input of the graph, at the placeholder ``node``."""
        return self._number(node, value, of_input=True)

    def is_read(self, node: fx.Node) -> bool:
        """Has Python code read the number that ``node`` makes, or one that is computed from it?"""
        depends = {node}
        for other in self.values:  # in the order in which they were made
            if not depends.isdisjoint(other.all_input_nodes):
                depends.add(other)
        return any(not depends.isdisjoint(operands) for _, _, operands, _ in self._readings)

    def record_number(self, function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """Record arithmetic on sizes; ``value`` is its result."""
        if self._is_paused() or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        node = self._writer.node("call_function", function, args, pure=True)
        return self._number(
            node, value, of_input=any(isinstance(x, InputInt | InputFloat) for x in args)
        )

    def note_reading(self, name: str, args: tuple[Any, ...], outcome: bool | None) -> None:
        """Note what Python code reads, for `log`.

        When torch pads packed sequences, it compares their lengths with the asked one, only to check it.
        """
        checks = sys._getframe(2).f_globals.get("__name__") == "torch.nn.utils.rnn"
        if not checks and not self._is_paused():
            nodes = tuple(getattr(value, "node", None) for value in args)
            self._readings.append((name, self._writer.layer, nodes, outcome))

    def log(self) -> SizeLog:
        """All sizes so far, and which of them Python code has read."""
        number = {node: i for i, node in enumerate(self.values)}
        return SizeLog(
            values=tuple(self.values.values()),
            sources=tuple(
                tuple(number[x] for x in node.all_input_nodes if x in number)
                for node in self.values
            ),
            readings=tuple(
                Reading(
                    name=name, layer=layer, operands=tuple(map(number.get, nodes)), outcome=outcome
                )
                for name, layer, nodes, outcome in self._readings
            ),
        )

    def _dimension(self, tensor: Tensor, name: str, dim: Any, value: int) -> int:
        """``value`` as a number that refers to the node that computes it from ``tensor``."""
        source = self._writer.node_of(tensor)
        if source.op == "get_attr":  # the shape of a parameter is the same in every run
            return value
        key = source, name, dim
        if key not in self._nodes:
            args = (tensor,) if dim is None else (tensor, plain(dim))
            self._nodes[key] = self._writer.node("call_method", name, args, pure=True)
        size: int = self._number(self._nodes[key], value)
        return size

    def _number(self, node: fx.Node, value: Any, *, of_input: bool = False) -> Any:
        """``value`` as a number that refers to ``node``, which computes it."""
        kinds: Any = (InputInt, InputFloat) if of_input else (SizeInt, SizeFloat)
        number = kinds[isinstance(value, float)](value)
        number.node, number.recorder = node, self
        self.values[node] = value
        return number
