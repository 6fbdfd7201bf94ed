"""The rewrite that runs convolutions of a concatenation in chunks, and never makes the concatenation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import JsonValue
from torch import fx, nn

from placer.program import Program, register_rewrite, with_graph
from placer.program.leaves import is_torch_leaf, must_stay_whole
from placer.space.call import Call, Replace, Rule
from placer.space.layout import Cuts, Layout
from placer.space.nodes import RunInWindows
from placer.space.operators import FIRST
from placer.space.rules import find_rule
from placer.space.values import whole_values
from placer.spec.rewrite import Rewrite

CHUNKS = "chunks"
CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_JOINS = (torch.cat, torch.concat, torch.concatenate)

MOST_CHUNKS = 16
"""The number for ``"chunks": "auto"``: a chunk of a concatenation is small then beside what a layer keeps."""


def chunk_rewrites(chunks: int | str) -> tuple[Rewrite, ...]:
    """The rewrites for the ``chunks`` of a spec; none for 1, and for "auto" where chunks are not needed."""
    several = isinstance(chunks, int) and chunks > 1
    return (Rewrite(name=CHUNKS, settings={"count": chunks}),) if several else ()


def count_chunked(program: Program) -> int:
    """How many nodes of ``program`` are convolutions of a concatenation in chunks."""
    return sum(
        isinstance(node.target, RunInWindows) and len(node.target.windows.inputs) > 1
        for node in program.graph.nodes
    )


@register_rewrite(CHUNKS)
def chunk_convolutions(program: Program, settings: Mapping[str, JsonValue]) -> Program:
    """Let every convolution that reads the concatenation of channels, as of a skip, read its parts in chunks.

    ::

        skip, up = ...                          skip, up = ...
        joined = cat([skip, up], 1)     ──►     conv = get_attr("conv")
        y = conv(joined)                        y = RunInWindows(…)(conv, skip, up)

    A concatenation that anything else reads is made as before. This is a split in space into a single part.
    """
    count = settings["count"]
    assert isinstance(count, int), "the spec's field is a number"
    joins = find_joins(program)
    if not joins:
        return program
    values = whole_values(program)
    found = {
        user: _rule(program, user, parts_of_join(join), values, count)
        for join in joins
        for user in join.users
    }
    joins = {x for x in joins if all(isinstance(found[user], Replace) for user in x.users)}
    graph, layer_of = fx.Graph(), dict(program.layers)
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node in joins:
            continue
        rule = found.get(node)
        if not isinstance(rule, Replace) or node.args[0] not in joins:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        layer = graph.create_node("get_attr", str(node.target), name=f"{node.name}_layer")
        given = (layer, *(copies[part] for part in rule.inputs))
        copies[node] = graph.create_node("call_function", rule.operation, given, name=node.name)
        layer_of[layer.name] = layer_of[node.name]
    return with_graph(program, graph, layer_of)


def _rule(
    program: Program,
    node: fx.Node,
    parts: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
    count: int,
) -> Rule:
    """How a convolution of the concatenation of ``parts`` runs in ``count`` chunks of planes."""
    module = program.model.get_submodule(str(node.target))
    shapes = [tuple(values[part].shape) for part in parts]
    if len(shapes[0]) <= FIRST:
        return "it is called without rows"
    cuts = Cuts((1,), (shapes[0][FIRST],))
    layouts = {
        part: Layout(cuts, shape, (FIRST,)) for part, shape in zip(parts, shapes, strict=True)
    }
    joined = node.all_input_nodes[0]
    name = type(module).__name__
    rule = find_rule(Call(node, name, module, values, layouts, {joined: parts}, count))
    return "it pads first" if isinstance(rule, Replace) and rule.before else rule


def find_joins(program: Program) -> set[fx.Node]:
    """The concatenations of channels that only convolutions read, which can run in chunks.

    A part whose memory is written later must be copied, as by a concatenation.
    """
    position = {name: i for i, name in enumerate(program.order)}
    last_use = {
        n: max(map(position.__getitem__, group)) for group in program.colocated for n in group
    }
    return {
        node
        for node in program.graph.nodes
        if _is_join(node, program.model)
        and all(
            last_use.get(part.name, -1) < position[node.name]
            and part.name not in program.written_inputs
            for part in parts_of_join(node)
        )
    }


def _is_join(node: fx.Node, model: nn.Module) -> bool:
    """Does ``node`` join tensors by their channels, and do only convolutions in chunks read the result?"""
    if node.target not in _JOINS or len(parts_of_join(node)) < 2:
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if dim != 1:
        return False
    return all(
        user.op == "call_module"
        and user.args == (node,)
        and not user.kwargs
        and isinstance(module := model.get_submodule(str(user.target)), CONVOLUTIONS)
        and is_torch_leaf(module)
        and not must_stay_whole(module)
        for user in node.users
    )


def parts_of_join(join: fx.Node) -> list[fx.Node]:
    """The tensors that a concatenation joins."""
    tensors = join.args[0] if join.args else ()
    return (
        [x for x in tensors if isinstance(x, fx.Node)] if isinstance(tensors, list | tuple) else []
    )
