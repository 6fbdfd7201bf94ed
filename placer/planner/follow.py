"""Adapts a plan to another program of its model, such as that for another mode or another size of input."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from difflib import SequenceMatcher

from placer.partition.units import program_order, unit_graph
from placer.plan.types import Plan
from placer.program import Program
from placer.regions import find_regions, region_keys, with_overlap


def follow_plan(plan: Plan, program: Program) -> Plan:
    """``plan`` with the nodes of ``program``, each on the stage of its counterpart.

    The same layers are recomputed and offloaded. Predicted bytes and seconds are still those of ``plan``.

    Within a layer, nodes are matched in order by operation (longest common blocks, by `difflib`). Others
    go to the stage of their layer, or of the layer around it, if that was on one stage; otherwise to the
    stage of the nodes that they read. No node is on an earlier stage than a node that it reads, and the
    nodes of a unit stay together. A stage may be empty. Every such assignment computes the same results;
    a good one moves few weights.
    """
    keys = region_keys(program, plan.checkpoint, plan.offload)
    key_of = dict(zip(program.order, keys, strict=True))
    stages = []
    for stage, nodes in zip(plan.stages, _stage_nodes(plan, program), strict=True):
        regions = find_regions(nodes, key_of)
        stages.append(
            replace(stage, nodes=nodes, regions=with_overlap(regions) if plan.overlaps else regions)
        )
    return replace(plan, stages=tuple(stages))


def _stage_nodes(plan: Plan, program: Program) -> tuple[tuple[str, ...], ...]:
    """For each stage of ``plan`` the nodes of ``program``, in program order."""
    stage_of = {name: stage.index for stage in plan.stages for name in stage.nodes}
    planned: dict[str, list[str]] = defaultdict(list)
    for name, layer in plan.node_layers.items():
        planned[layer].append(name)
    present: dict[str, list[str]] = defaultdict(list)
    for name in program.order:
        present[program.nodes[name].layer].append(name)
    wanted: dict[str, int] = {}
    for layer, names in present.items():
        counterparts = planned.get(layer, [])
        around = next((planned[x] for x in (layer, *_parents(layer)) if x in planned), [])
        if len(found := {stage_of.get(old, 0) for old in around}) == 1:
            wanted |= dict.fromkeys(names, *found)
        matcher = SequenceMatcher(
            None, [_operation(n) for n in counterparts], [_operation(n) for n in names], False
        )
        for first, second, size in matcher.get_matching_blocks():
            for old, new in zip(counterparts[first:][:size], names[second:][:size], strict=True):
                wanted[new] = stage_of.get(old, 0)
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
