"""Maps lines of generated code to the nodes that they compute, for error messages."""

from __future__ import annotations

import re
from types import CodeType

from placer.emit.types import SegmentCode

_ASSIGNMENT = re.compile(r"\s+(\w+)\s*(?::[^=]*)?=")


def node_lines(segment: SegmentCode) -> dict[int, str]:
    """Line number (as in frames and tracebacks) -> name of the node that the line computes."""
    code: CodeType = segment.forward.__code__
    lines = segment.source.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("def forward("))
    first = code.co_firstlineno
    found: dict[int, str] = {}
    for offset, line in enumerate(lines[start + 1 :], 1):
        match = _ASSIGNMENT.match(line)
        if match:
            found[first + offset] = match[1]
    return found
