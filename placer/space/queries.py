"""What a program that is split in space has: its parts, its windows, and what it gathers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, fx

from placer.program import Program
from placer.space.layout import Cuts, Layout, is_empty, sizes
from placer.space.nodes import CutWhole, GatherParts, InSpace, RunInWindows

OWN_BOXES = "own_boxes"  # a setting of the rewrite
_EXACT = 8  # shards, of which each that takes another amount of memory is told apart
_Load: TypeAlias = tuple[tuple[int, ...], ...]


def parts_in(graph: fx.Graph) -> set[str]:
    """The nodes of which every shard has a part of its own, by name."""
    found: set[str] = set()
    for node in graph.nodes:
        if isinstance(node.target, InSpace):
            if not node.target.is_whole:
                found.add(node.name)
        elif any(x.name in found for x in node.all_input_nodes) and node.op != "output":
            found.add(node.name)
    return found


def nodes_in_space(program: Program) -> Iterable[tuple[fx.Node, InSpace]]:
    """The nodes of ``program`` that are operations over shards."""
    for node in program.graph.nodes:
        if isinstance(node.target, InSpace):
            yield node, node.target


def find_gathered(program: Program) -> dict[str, dict[str, str]]:
    """Why values of ``program`` are gathered, besides its results: node -> the layer that needs it whole."""
    found: dict[str, dict[str, str]] = {}
    for node, operation in nodes_in_space(program):
        if isinstance(operation, GatherParts) and operation.reason:
            layer = program.layers.get(operation.reader, "")
            found.setdefault(operation.reason, {})[node.name] = layer or operation.reader
    return found


def cut_inputs(program: Program) -> dict[str, Layout | str]:
    """How the inputs that are cut are; of one that an operation also reads whole, the layer of that."""
    found: dict[str, Layout | str] = {}
    for node in program.graph.nodes:
        cuts = [user.target for user in node.users if isinstance(user.target, CutWhole)]
        if node.op == "placeholder" and cuts:
            others = [user for user in node.users if not isinstance(user.target, CutWhole)]
            layers = (program.layers.get(user.name) or user.name for user in others)
            found[node.name] = next(layers, cuts[0].layout)
    return found


def own_parts(program: Program, inputs: Sequence[Any], shard: int) -> list[Any]:
    """``inputs``, fake, with the part of ``shard`` in place of each of which a process passes its own.

    Those are all that are cut and nothing reads whole, if the spec says so.
    """
    if not any(each.settings.get(OWN_BOXES) for each in program.rewrites):
        return list(inputs)
    layouts = cut_inputs(program)
    names = (node.name for node in program.graph.nodes if node.op == "placeholder")
    return [
        _own_part(x, layout, shard)
        if isinstance(x, Tensor) and isinstance(layout := layouts.get(name), Layout)
        else x
        for name, x in zip(names, inputs, strict=False)
    ]


def _own_part(x: Tensor, layout: Layout, shard: int) -> Tensor:
    shape = layout.shape_of(layout.boxes[shard], x.shape)
    return x.new_empty(shape, requires_grad=x.requires_grad)


def cuts_of(program: Program) -> Cuts | None:
    """How ``program`` is split in space; None if it is not."""
    return next((operation.layout.cuts for _, operation in nodes_in_space(program)), None)


def similar_shards(program: Program) -> list[int]:
    """For each shard the first one that takes as much memory: its parts and pieces have the same sizes.

    Of more than a few shards, one that takes at least as much, because its parts and pieces are as large or
    larger: that is most often one in the middle of the grid.
    """
    cuts = cuts_of(program)
    if cuts is None:
        return [0]
    loads = [_load(program, shard) for shard in range(cuts.shards)]
    if cuts.shards <= _EXACT:
        return [loads.index(load) for load in loads]
    order = sorted(range(cuts.shards), key=lambda shard: -sum(sum(part) for part in loads[shard]))
    found = []
    for load in loads:
        found.append(next(other for other in order if _covers(loads[other], load)))
    return found


def _covers(large: _Load, small: _Load) -> bool:
    """Is nothing of ``small`` larger?"""
    return all(
        len(a) >= len(b) and all(x >= y for x, y in zip(sorted(a)[::-1], sorted(b)[::-1]))  # noqa: B905
        for a, b in zip(large, small, strict=True)
    )


def _load(program: Program, shard: int) -> _Load:
    """The elements of a shard's parts, of what it reads, and of the pieces that it gets and sends."""
    found: list[tuple[int, ...]] = []
    for _, operation in nodes_in_space(program):
        found.append((math.prod(sizes(operation.layout.boxes[shard])),))
        if isinstance(operation, RunInWindows):
            windows = operation.windows
            for window in windows.windows:
                found += [
                    tuple(
                        math.prod(sizes(box))
                        for pair, box in window.pieces.items()
                        if pair[end] == shard
                    )
                    for end in (0, 1)
                ]
            out = windows.outputs[shard]
            read = () if is_empty(out) else sizes(windows.operator.source(out))
            found.append((math.prod(read) if read else 0,))
    return tuple(found)


def count_windows(program: Program) -> int:
    """How many operations of ``program`` run in windows."""
    return sum(isinstance(op, RunInWindows) for _, op in nodes_in_space(program))
