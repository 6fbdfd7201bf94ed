"""Functions of stages are compiled from a graph, and tracebacks through them show their lines."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from torch import fx

from placer.emit.boxed import BoxedCodeGen, compile_graph


def _fail(x: Any) -> Any:
    raise ValueError(f"no {x}")


def test_a_traceback_shows_the_line_of_the_stage() -> None:
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen("tree"))
    _device, x, y = (graph.placeholder(name) for name in ("device", "x", "y"))
    graph.output((graph.call_function(_fail, (x,)), y))
    forward = compile_graph(graph)
    with pytest.raises(ValueError, match="no 1") as raised:
        forward(None, "cpu", [1, 2])
    (line,) = [f.line for f in traceback.extract_tb(raised.tb) if f.filename.startswith("<placer")]
    assert line is not None and "_fail(x)" in line
