"""A step that was recorded once, several times: as if it had been run again."""

from __future__ import annotations

from collections.abc import Iterable

from placer.timeline.types import Block, Event, Timeline


def repeat_parts(timeline: Timeline, parts: Iterable[range]) -> Timeline:
    """``timeline``'s events of ``parts`` (ranges of its events), one part after the other.

    A part that comes again makes blocks of its own, which are the ones that later parts free. A block that
    is never given back is made the first time only. A part frees what is there: where it would free a
    block that no part before it made, it frees nothing.
    """
    given_back = {event.block for event in timeline.events if event.kind == "free"}
    blocks: list[Block] = []
    events: list[Event] = []
    present: dict[int, int] = {}  # block of the timeline -> block of the result
    for part in parts:
        for event in timeline.events[part.start : part.stop]:
            if event.kind == "free":
                if event.block in present:
                    events.append(Event("free", present.pop(event.block)))
            elif event.block not in present or event.block in given_back:
                present[event.block] = len(blocks)
                blocks.append(timeline.blocks[event.block])
                events.append(Event("allocate", present[event.block]))
    return Timeline(blocks=blocks, events=events)
