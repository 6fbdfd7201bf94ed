"""The values of a program's nodes, on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from placer.program import FakeConverter, Program, read_state


def whole_values(program: Program) -> dict[fx.Node, Any]:
    """The value of every node of the graph, on fake tensors, for the captured call."""
    captured = program.captured
    converter = FakeConverter()
    found: dict[fx.Node, Any] = {}
    constants = {name: converter.tensor(t) for name, t in captured.constants.items()}

    class Keep(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found[n] = constants[n.name] if n.name in constants else super().run_node(n)
            return found[n]

    inputs = [each.on_meta() for each in captured.call.inputs]
    given = [
        x if isinstance(x, int | float) else converter.inputs([x])[0]
        for x in (*inputs, *read_state(captured, None))
    ]
    model = converter.module(captured.model)
    with torch.no_grad(), converter.running(captured.conditions.guess):
        Keep(model, garbage_collect_values=False, graph=program.graph).run(*given)
    return found
