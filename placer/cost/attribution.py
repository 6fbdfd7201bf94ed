"""Attribute autograd nodes to nodes of the program, to know whose backward is running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from placer.autograd_graph import nodes_behind, nodes_of
from placer.cost.storages import StorageRecorder
from placer.operands import nbytes_of


class BackwardAttribution:
    """Maps autograd nodes to positions of program nodes, and tells the recorder when they run."""

    def __init__(self, recorder: StorageRecorder) -> None:
        self._recorder = recorder
        self._claimed: dict[Any, int] = {}
        # Position of a node -> how many weights it was the first to read
        self.weights = Counter[int]()

    def claim(self, result: Any, position: int) -> None:
        """Attribute the autograd nodes behind ``result`` to ``position``, except those attributed before."""
        for node in nodes_behind(nodes_of(result), stops=self._claimed):
            self._claimed[node] = position
            self.weights[position] += hasattr(node, "variable")  # AccumulateGrad
            node.register_prehook(self._starter(position))
            node.register_hook(self._sender(node, position))

    def _starter(self, position: int) -> Callable[[Any], None]:
        def start(_: Any) -> None:
            if self._recorder.backward and self._recorder.position != position:
                self._recorder.start_node(position)

        return start

    def _sender(self, node: Any, position: int) -> Callable[[Any, Any], None]:
        """A hook that records which other nodes the backward of ``node`` sends gradients to."""
        parents = [parent for parent, _ in node.next_functions]
        targets = [self._claimed.get(parent) for parent in parents]
        weights = [hasattr(parent, "variable") for parent in parents]  # AccumulateGrad

        def send(grad_inputs: Any, _: Any) -> None:
            for grad, target, of_weight in zip(grad_inputs, targets, weights, strict=False):
                if isinstance(grad, Tensor) and target is not None and target != position:
                    uses = self._recorder.uses_of(grad)
                    if uses is not None:
                        uses.sent.append((position, target, nbytes_of(grad)))
                        uses.of_weight |= of_weight

        return send

    def mark_gradient(self, parameter: Tensor) -> None:
        """Mark the storage of ``parameter.grad``, just accumulated, as a parameter's gradient."""
        if parameter.grad is None:  # an argument of a reentrant checkpoint that is not used inside
            return
        uses = self._recorder.uses_of(parameter.grad)
        if uses is not None:
            uses.parameter_gradient = True
