"""Writes the nodes of a program that is split in space once for every shard, for a process that runs all.

::

    conv = get_attr("conv")              conv, conv__1 = get_attr("conv"), get_attr("conv")
    y = windows(conv, x)         ──►     y, y__1 = together(windows, (conv, x), (conv__1, x__1))
    z = relu(y)                          z, z__1 = relu(y), relu(y__1)

Nodes of shard 0, and those of whole values, keep their names.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from placer.plan.types import Plan
from placer.program import Program
from placer.space import Exchange, InSpace, innermost_exchange, parts_in


class Together:
    """Runs an operation over the shards of this process; called with the arguments of each."""

    def __init__(self, operation: InSpace) -> None:
        self._operation = operation
        self.__name__ = self.__qualname__ = operation.name
        self.__module__ = __name__

    def __call__(self, *arguments: tuple[Any, ...]) -> Any:
        exchange: Exchange = innermost_exchange()
        found = self._operation.together(exchange, arguments)
        return found[0] if self._operation.is_whole else tuple(found)


@dataclass(frozen=True)
class Expanded:
    """A program with the nodes of all shards, and the plan's stages with these nodes.

    ``shard_of`` has the shard of each node whose value is a part of one after the first.
    """

    program: Program
    plan: Plan
    shard_of: Mapping[str, int]


def expand_shards(program: Program, plan: Plan) -> Expanded:
    """``program`` and ``plan`` with a node per shard."""
    shards, parts = plan.shards, parts_in(program.graph)
    graph = fx.Graph()
    copies: dict[fx.Node, list[fx.Node]] = {}  # per shard, or the only one
    base: dict[str, str] = {}  # the node that each node is written for
    shard_of: dict[str, int] = {}

    def of_shard(shard: int) -> Any:
        return lambda node: copies[node][shard if len(copies[node]) > 1 else 0]

    def note(made: fx.Node, node: fx.Node, shard: int = 0) -> fx.Node:
        base[made.name] = node.name
        if shard:
            shard_of[made.name] = shard
        return made

    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], of_shard(0)))
        elif isinstance(node.target, InSpace):
            given = tuple(
                tuple(fx.node.map_arg(node.args, of_shard(shard))) for shard in range(shards)
            )
            whole = node.target.is_whole
            name = node.name if whole else f"{node.name}__parts"
            made = note(
                graph.create_node("call_function", Together(node.target), given, name=name), node
            )
            copies[node] = [made]
            if not whole:
                copies[node] = [
                    note(
                        graph.create_node(
                            "call_function",
                            operator.getitem,
                            (made, shard),
                            name=_name(node, shard),
                        ),
                        node,
                        shard,
                    )
                    for shard in range(shards)
                ]
        else:
            several = node.name in parts or _is_read_by_shards(node, parts)
            copies[node] = [
                note(
                    graph.create_node(
                        node.op,
                        node.target,
                        *fx.node.map_arg((node.args, node.kwargs), of_shard(shard)),
                        name=_name(node, shard),
                    ),
                    node,
                    shard,
                )
                for shard in range(shards if several else 1)
            ]
    names: dict[str, list[str]] = {}
    for name, source in base.items():
        names.setdefault(source, []).append(name)
    captured = program.captured
    constants = {n: t for node, t in captured.constants.items() for n in names.get(node, ())}
    paths = {n: p for node, p in captured.constant_paths.items() for n in names.get(node, ())}
    expanded = replace(
        program,
        captured=replace(captured, constants=constants, constant_paths=paths),
        graph=graph,
        nodes={
            name: program.nodes[source] for name, source in base.items() if source in program.nodes
        },
    )
    stages = tuple(
        replace(
            stage,
            nodes=tuple(n for node in stage.nodes for n in names[node]),
            regions=tuple(
                replace(region, first=names[region.first][0], last=names[region.last][-1])
                for region in stage.regions
            ),
        )
        for stage in plan.stages
    )
    return Expanded(expanded, replace(plan, stages=stages), shard_of)


def _name(node: fx.Node, shard: int) -> str:
    return f"{node.name}__{shard}" if shard else node.name


def _is_read_by_shards(node: fx.Node, parts: set[str]) -> bool:
    """Is it a weight or constant that an operation on parts reads?"""
    return node.op == "get_attr" and any(
        user.name in parts or isinstance(user.target, InSpace) for user in node.users
    )
