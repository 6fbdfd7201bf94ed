"""Which node of the model is running: from the line of the generated stage code, or its backward."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable, Mapping
from types import FrameType

from placer._torch import next_sequence_number, running_sequence_number
from placer.emit import SegmentCode, StageCode, node_lines
from placer.timeline import Where


class Attribution:
    """Tells where the running operation belongs; ask it from a dispatch mode, in forward and backward.

    Forward: the innermost frame that runs a stage's generated code, and its line. Backward: autograd
    numbers its nodes as they are made, so the number of the one that runs now leads back to the
    operation of the forward that made it.
    """

    def __init__(self, stages: Iterable[StageCode], layer_of: Mapping[str, str]) -> None:
        self._segments = [segment for stage in stages for segment in stage.segments]
        # By the id of their code: its hash is computed from all of it, every time.
        self._places = {id(s.forward.__code__): _node_places(s) for s in self._segments}
        self._layer_of = layer_of
        self._numbers: list[int] = []
        self._nodes: list[str] = []

    def where(self) -> Where:
        number = running_sequence_number()
        if number is not None:
            again = self._forward_node()
            if again:
                return self._at("recompute", again)
            return self._at("backward", self._made_by(number))
        node = self._forward_node()
        # Autograd makes an operation's node before the operation is dispatched.
        made = next_sequence_number() - 1
        if not self._numbers or made > self._numbers[-1]:
            self._numbers.append(made)
            self._nodes.append(node)
        return self._at("forward", node)

    def layer_of_node(self, number: int) -> str:
        """The layer whose forward made the autograd node of that number; "" if none did."""
        return self._layer_of.get(self._made_by(number), "")

    def _made_by(self, number: int) -> str:
        index = bisect.bisect_right(self._numbers, number) - 1
        return self._nodes[index] if index >= 0 else ""

    def _at(self, phase: str, node: str) -> Where:
        return Where(phase=phase, node=node, layer=self._layer_of.get(node, ""))

    def _forward_node(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            places = self._places.get(id(frame.f_code))
            if places is not None:
                starts, nodes = places
                return nodes[bisect.bisect_right(starts, frame.f_lasti) - 1]
            frame = frame.f_back
        return ""


def _node_places(segment: SegmentCode) -> tuple[list[int], list[str]]:
    """Where in the segment's bytecode each run of instructions starts, and the node that it computes.

    Python looks a frame's line up from the beginning of its code, which is long for a large stage.
    """
    lines = node_lines(segment)
    ranges = list(segment.forward.__code__.co_lines())
    return [start for start, _, _ in ranges], [lines.get(line or 0, "") for *_, line in ranges]
