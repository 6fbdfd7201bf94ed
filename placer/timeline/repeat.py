"""Makes timelines from a recording: of several steps, or of another rank that runs equal nodes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from placer.timeline.types import Block, Event, Task, Timeline


def repeat_parts(timeline: Timeline, parts: Iterable[range]) -> Timeline:
    """The timeline of ``parts`` (ranges of events of ``timeline``), one part after the other.

    A part that is repeated allocates new blocks, which later parts free. A block that is never freed in
    ``timeline`` is allocated only the first time. An event that frees a block which is not allocated at
    that point is left out.
    """
    given_back = {event.block for event in timeline.events if event.kind == "free"}
    blocks: list[Block] = []
    events: list[Event] = []
    present: dict[int, int] = {}  # block of the timeline -> block of the result
    for part in parts:
        for event in timeline.events[part.start : part.stop]:
            if event.kind == "free":
                if event.block in present:
                    events.append(event._replace(block=present.pop(event.block)))
            elif event.kind == "read":
                events.append(event._replace(block=present[event.block]))
            elif event.block not in present or event.block in given_back:
                present[event.block] = len(blocks)
                blocks.append(timeline.blocks[event.block])
                events.append(event._replace(block=present[event.block]))
    return Timeline(blocks=blocks, events=events)


def rename_nodes(
    timeline: Timeline,
    names: Mapping[str, str],
    layer_of: Mapping[str, str],
    stages: Mapping[int, int],
) -> Timeline:
    """``timeline`` for other nodes and stages: ``names`` maps its nodes to them, ``stages`` the indices.

    ``layer_of`` has the layers of the other nodes.
    """

    def renamed(block: Block) -> Block:
        where = block.where
        if where.node in names:
            node = names[where.node]
            where = replace(where, node=node, layer=layer_of.get(node, ""))
        if block.name not in names:
            return replace(block, where=where)
        name = names[block.name]
        return replace(block, name=name, layer=layer_of.get(name, ""), where=where)

    @functools.cache
    def moved(task: Task | None) -> Task | None:
        if task is None or task.action is None:
            return task
        stage = stages[task.action.stage_index]
        return task._replace(action=replace(task.action, stage_index=stage))

    return Timeline(
        blocks=[renamed(block) for block in timeline.blocks],
        events=[event._replace(task=moved(event.task)) for event in timeline.events],
    )
