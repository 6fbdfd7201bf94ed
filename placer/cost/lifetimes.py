"""Derive when each storage is alive, in terms of the nodes that make and need it.

The source is the timeline of one step on fake tensors (`placer.cost.record`), which has its allocations and
frees in order, on one device. Lifetimes in terms of nodes hold for any placement, so all estimates of the
planner are computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from placer.cost.record import Recording
from placer.cost.storages import OUTSIDE, NodeRun, StorageUses


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifetime:
    """When a storage is alive. Nodes are given by position; the loss is last."""

    nbytes: int
    made_by: int  # `OUTSIDE` for the model's inputs
    backward: bool  # made in backward
    freed_by: int | None  # the node whose backward freed it; None: not freed in backward
    uses: StorageUses


# (storage, change of live bytes); a change of 0 is a read of a tensor that forward saved.
Change = tuple[Lifetime, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The storages of a run, in the order of their allocation, and what happens in each node.

    Sequences over nodes have one entry per position. ``results`` are the storages of each node's result.
    ``forward_transient`` counts what a node makes: the most bytes alive at a time in its forward.
    ``backward`` has the changes in its backward, in order.
    """

    storages: tuple[Lifetime, ...]
    results: tuple[tuple[Lifetime, ...], ...]
    forward_transient: tuple[int, ...]
    backward: tuple[tuple[Change, ...], ...]


def find_lifetimes(recording: Recording) -> Lifetimes:
    """The lifetimes of all storages of ``recording``, in O(events) time."""
    lifetime_of = _lifetime_of(recording)
    count = len(recording.output_nbytes)
    transient = [0] * count
    backward: list[list[Change]] = [[] for _ in range(count)]
    for run, numbers in _runs(recording):
        if run.position == OUTSIDE:
            continue
        changes = list(_changes(recording, lifetime_of, numbers))
        if run.backward:
            backward[run.position] += changes
        else:
            transient[run.position] = _most_of_own(run.position, changes)
    return Lifetimes(
        storages=tuple(lifetime_of[block] for block in recording.uses),
        results=tuple(
            tuple(lifetime_of[block] for block in blocks) for blocks in recording.output_blocks
        ),
        forward_transient=tuple(transient),
        backward=tuple(map(tuple, backward)),
    )


def _lifetime_of(recording: Recording) -> list[Lifetime]:
    """The lifetime of each block of the timeline."""
    position = {name: i for i, name in enumerate(recording.order)}
    loss = len(recording.order)
    freed_by: dict[int, int] = {}
    for run, numbers in _runs(recording):
        if run.backward and run.position != OUTSIDE:
            for event in recording.timeline.events[numbers.start : numbers.stop]:
                if event.kind == "free":
                    freed_by[event.block] = run.position
    return [
        Lifetime(
            nbytes=block.nbytes,
            made_by=position.get(block.where.node, loss) if block.where.phase else OUTSIDE,
            backward=block.where.phase == "backward",
            freed_by=freed_by.get(number),
            uses=recording.uses[number],
        )
        for number, block in enumerate(recording.timeline.blocks)
    ]


def _runs(recording: Recording) -> Iterator[tuple[NodeRun, range]]:
    """The runs of nodes, and the numbers of their events."""
    starts = [*(run.start for run in recording.runs), len(recording.timeline.events)]
    return zip(recording.runs, (range(*pair) for pair in pairwise(starts)), strict=True)


def _changes(recording: Recording, lifetime_of: list[Lifetime], numbers: range) -> Iterator[Change]:
    """The changes of live bytes in the events with these numbers."""
    sign = {"allocate": 1, "free": -1, "read": 0}
    for event in recording.timeline.events[numbers.start : numbers.stop]:
        stored = lifetime_of[event.block]
        yield stored, sign[event.kind] * stored.nbytes


def _most_of_own(position: int, changes: list[Change]) -> int:
    """The most bytes alive at a time, of the storages that the node at ``position`` makes."""
    live = most = 0
    for stored, change in changes:
        if stored.made_by == position:
            live += change
            most = max(most, live)
    return most
