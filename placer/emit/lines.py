"""From a line of generated code to the node that it computes."""

from __future__ import annotations

import re
from types import CodeType

from placer.emit.types import SegmentCode

_ASSIGNMENT = re.compile(r"\s+(\w+)\s*(?::[^=]*)?=")


def node_lines(piece: SegmentCode) -> dict[int, str]:
    """Line of the piece's code, as frames and tracebacks number it -> the node that it computes."""
    code: CodeType = piece.forward.__code__
    lines = piece.source.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("def forward("))
    first = code.co_firstlineno
    found: dict[int, str] = {}
    for offset, line in enumerate(lines[start + 1 :], 1):
        match = _ASSIGNMENT.match(line)
        if match:
            found[first + offset] = match[1]
    return found
