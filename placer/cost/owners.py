"""Whose backward is running: hooks on the autograd nodes tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from placer.autograd_graph import nodes_behind, nodes_of
from placer.cost.storages import StorageRecorder


class BackwardOwners:
    """Knows which node each autograd node belongs to, and tells the recorder when it runs."""

    def __init__(self, recorder: StorageRecorder) -> None:
        self._recorder = recorder
        self._claimed: dict[Any, int] = {}

    def claim(self, result: Any, position: int) -> None:
        """All autograd nodes between ``result`` and what is claimed already belong to ``position``."""
        for node in nodes_behind(nodes_of(result), stops=self._claimed):
            self._claimed[node] = position
            node.register_prehook(self._starter(position))
            node.register_hook(self._sender(node, position))

    def _starter(self, position: int) -> Callable[[Any], None]:
        def start(_: Any) -> None:
            if self._recorder.backward and self._recorder.position != position:
                self._recorder.start_node(position)

        return start

    def _sender(self, node: Any, position: int) -> Callable[[Any, Any], None]:
        """Notes which part of a storage the backward of ``node`` hands on to which other node."""
        parents = [parent for parent, _ in node.next_functions]
        targets = [self._claimed.get(parent) for parent in parents]
        weights = [hasattr(parent, "variable") for parent in parents]  # AccumulateGrad

        def send(grad_inputs: Any, _: Any) -> None:
            for grad, target, of_weight in zip(grad_inputs, targets, weights, strict=False):
                if isinstance(grad, Tensor) and target is not None and target != position:
                    stored = self._recorder.storage(grad)
                    if stored is not None:
                        nbytes = grad.numel() * grad.element_size()
                        stored.sent.append((position, target, nbytes))
                        stored.of_weight |= of_weight

        return send

    def mark_gradient(self, parameter: Tensor) -> None:
        """Note that the gradient of ``parameter``, which has just been accumulated, is one."""
        if parameter.grad is None:  # an argument of a reentrant checkpoint that it does not use
            return
        stored = self._recorder.storage(parameter.grad)
        if stored is not None:
            stored.parameter_gradient = True
