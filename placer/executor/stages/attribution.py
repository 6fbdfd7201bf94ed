"""Finds the node of the model that is running, in forward by the line of generated code that runs."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping
from types import CodeType, FrameType

from placer._torch import next_sequence_number, running_sequence_number
from placer.emit import node_lines
from placer.executor.task import current_task
from placer.timeline import OPTIMIZER, StepPosition


class Attribution:
    """Finds the node that the running operation belongs to; call `where` from a dispatch mode.

    In forward, the innermost frame that runs a stage's generated code gives the line, and so the node.
    In backward, the sequence number of the running autograd node gives the forward operation that
    made it. Numbers grow with time, so `where` must be called for every forward operation.
    """

    def __init__(self, layer_of: Mapping[str, str]) -> None:
        # Keyed by id, because hashing a code object reads all of it every time.
        self._places: dict[int, tuple[CodeType, list[int], list[str]]] = {}
        self._layer_of = layer_of
        self._numbers: list[int] = []
        self._nodes: list[str] = []

    def where(self) -> StepPosition:
        """The phase, node and layer of the operation that is being dispatched."""
        if current_task() == OPTIMIZER:
            return StepPosition(phase="optimizer")
        number = running_sequence_number()
        if number is not None:
            again = self._forward_node()
            if again:
                return self._at("recompute", again)
            return self._at("backward", self._made_by(number))
        node = self._forward_node()
        # Autograd creates the node of an operation before it dispatches the operation.
        made = next_sequence_number() - 1
        if not self._numbers or made > self._numbers[-1]:
            self._numbers.append(made)
            self._nodes.append(node)
        return self._at("forward", node)

    def _made_by(self, number: int) -> str:
        index = bisect.bisect_right(self._numbers, number) - 1
        return self._nodes[index] if index >= 0 else ""

    def _at(self, phase: str, node: str) -> StepPosition:
        return StepPosition(phase=phase, node=node, layer=self._layer_of.get(node, ""))

    def _forward_node(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            lines = node_lines(frame.f_globals)
            if lines is not None:
                code = frame.f_code
                if id(code) not in self._places:
                    self._places[id(code)] = code, *_node_offsets(code, lines)
                _, starts, nodes = self._places[id(code)]
                return nodes[bisect.bisect_right(starts, frame.f_lasti) - 1]
            frame = frame.f_back
        return ""


def _node_offsets(code: CodeType, nodes: Mapping[int, str]) -> tuple[list[int], list[str]]:
    """Bytecode offsets at which the lines of ``code`` start, and the node that each line computes.

    Used instead of ``frame.f_lineno``, which Python finds by a scan from the beginning of the code.
    """
    ranges = list(code.co_lines())
    return [start for start, _, _ in ranges], [nodes.get(line or 0, "") for *_, line in ranges]
