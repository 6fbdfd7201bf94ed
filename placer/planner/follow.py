"""Adapts a plan to another program of its model, such as that for another mode or another size of input."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TypeVar

from placer.partition.units import program_order, unit_graph
from placer.plan.types import Plan
from placer.program import Program
from placer.regions import RegionKey, find_regions, whole_groups, with_overlap

_T = TypeVar("_T")


def follow_plan(plan: Plan, program: Program) -> Plan:
    """``plan`` with the nodes of ``program``, each on the stage and in the region of its counterpart.

    Predicted bytes and seconds are still those of ``plan``.

    Within a layer, nodes are matched in order by operation (longest common blocks, by `difflib`). Others
    go to the stage of their layer, or of the layer around it, if that was on one stage; otherwise to the
    stage of the nodes that they read. Regions are followed alike, and a node without one is in none. No node
    is on an earlier stage than a node that it reads, and the nodes of a unit stay together. A stage may be
    empty. Every such assignment computes the same results; a good one moves few weights.
    """
    layers = list(_layers(plan, program))
    key_of = _regions(plan, program, layers)
    stages = []
    for stage, nodes in zip(plan.stages, _stage_nodes(plan, program, layers), strict=True):
        regions = find_regions(nodes, key_of)
        stages.append(
            replace(stage, nodes=nodes, regions=with_overlap(regions) if plan.overlaps else regions)
        )
    return replace(plan, stages=tuple(stages))


@dataclass(frozen=True, slots=True)
class _Layer:
    """The nodes of a layer in a program, those ``planned`` for it or the layer around it, and the pairs."""

    nodes: Sequence[str]
    planned: Sequence[str]
    counterparts: Mapping[str, str]  # node -> planned node


def _layers(plan: Plan, program: Program) -> Iterator[_Layer]:
    planned: dict[str, list[str]] = defaultdict(list)
    for name, layer in plan.node_layers.items():
        planned[layer].append(name)
    present: dict[str, list[str]] = defaultdict(list)
    for name in program.order:
        present[program.nodes[name].layer].append(name)
    for layer, names in present.items():
        own = planned.get(layer, [])
        around = next((planned[x] for x in (layer, *_parents(layer)) if x in planned), [])
        matcher = SequenceMatcher(
            None, [_operation(n) for n in own], [_operation(n) for n in names], False
        )
        pairs = {
            new: old
            for first, second, size in matcher.get_matching_blocks()
            for old, new in zip(own[first:][:size], names[second:][:size], strict=True)
        }
        yield _Layer(names, around, pairs)


def _followed(layers: Sequence[_Layer], values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """The values of the nodes of a program, if planned nodes have ``values``, or else ``default``."""
    found: dict[str, _T] = {}
    for layer in layers:
        if len(alike := {values.get(old, default) for old in layer.planned}) == 1:
            found |= dict.fromkeys(layer.nodes, *alike)
        found |= {new: values.get(old, default) for new, old in layer.counterparts.items()}
    return found


def _regions(
    plan: Plan, program: Program, layers: Sequence[_Layer]
) -> Mapping[str, RegionKey | None]:
    """The region of each node of ``program``."""
    planned: dict[str, RegionKey | None] = {}
    for stage in plan.stages:
        for region in stage.regions:
            first, last = stage.nodes.index(region.first), stage.nodes.index(region.last)
            key = RegionKey(label=region.first, recompute=region.recompute, offload=region.offload)
            planned |= dict.fromkeys(stage.nodes[first : last + 1], key)
    found = _followed(layers, planned, None)
    keys = whole_groups(program, [found.get(name) for name in program.order])
    return dict(zip(program.order, keys, strict=True))


def _stage_nodes(
    plan: Plan, program: Program, layers: Sequence[_Layer]
) -> tuple[tuple[str, ...], ...]:
    """For each stage of ``plan`` the nodes of ``program``, in program order."""
    stage_of = {name: stage.index for stage in plan.stages for name in stage.nodes}
    wanted = _followed(layers, stage_of, 0)
    units = unit_graph(program)
    placed: dict[int, int] = {}
    stages: list[list[int]] = [[] for _ in plan.stages]
    for unit in program_order(units):
        members = units.nodes[unit]["nodes"]
        asked = [wanted[program.order[i]] for i in members if program.order[i] in wanted]
        after = [placed[before] for before in units.predecessors(unit)]
        placed[unit] = max([*asked[:1], *after], default=0)
        stages[placed[unit]] += members
    return tuple(tuple(program.order[i] for i in sorted(nodes)) for nodes in stages)


def _parents(layer: str) -> list[str]:
    """The layers around ``layer``, from inside."""
    parts = layer.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _operation(node: str) -> str:
    """The operation of a node: its name without the number at the end."""
    return re.sub(r"_\d+$", "", node)
