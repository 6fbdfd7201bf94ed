"""Finds the results of a model that depend on the batch, and so have a part for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx

from placer.program import Program

_BATCH = ("batch",)


def find_batched_results(program: Program, result: Sequence[tuple[str, Any]]) -> tuple[bool, ...]:
    """For each entry of the model's ``result``: does it depend on an input with a batch dimension?

    A node depends on its inputs, on nodes that share memory with it, and on nodes that write the
    parameters and buffers that it reads. A result that does not depend on the batch, such as a table
    of positions, is the same for every micro-batch.
    """
    flow: nx.DiGraph[Any] = nx.DiGraph()
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    for name, dim in zip(placeholders, program.call.batch_dims, strict=True):
        if dim is not None or name in program.mutated_inputs:
            flow.add_edge(_BATCH, name)
    for node in program.graph.nodes:
        flow.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
    for group in program.colocated:
        nx.add_cycle(flow, group)
    for node, written in program.mutated_state_of.items():
        flow.add_edges_from((node, ("state", name)) for name in written)
    for node, read in program.state_of.items():
        flow.add_edges_from((("state", name), node) for name in read)
    reached = nx.descendants(flow, _BATCH) if _BATCH in flow else set()
    return tuple(kind == "value" and value in reached for kind, value in result)
