"""Finds how long a stage keeps a received value: until backward, or only until its last reader."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable, StoredValue
from placer.partition.rectangles import NEVER
from placer.partition.stage_cost.pending_gradients import IntervalCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The nodes that need a result, as sorted positions.

    ``kept`` are the nodes that save it for backward, ``used`` all nodes that use it. ``lent`` lists the
    results that share its storage, as (position of the result, position of its last reader).
    """

    kept: tuple[int, ...]
    used: tuple[int, ...]
    lent: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The `Need` of each node's result and of each input of the model."""

    nodes: tuple[Need, ...]
    inputs: tuple[Need, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A result, or an input (``producer`` is -1), that stages which start after its producer may receive."""

    producer: int
    readers: tuple[int, ...]  # sorted; not empty
    nbytes: float
    need: Need


def find_needs(costs: CostTable, place: NDArray[np.int64]) -> Needs:
    """The needs of all results, including those of their views. ``place`` has the position of each node."""
    lent: list[list[tuple[int, int]]] = [[] for _ in costs.values]
    at: list[int] = place.tolist()
    for node, stored_in in enumerate(costs.results):
        if costs.readers[node]:
            last = max([at[reader] for reader in costs.readers[node]])
            for value in stored_in:
                lent[value].append((at[node], last))
    needs = [_need(costs, v, at, results) for v, results in zip(costs.values, lent, strict=True)]
    inputs = [need for value, need in zip(costs.values, needs, strict=True) if value.producer < 0]
    if len(inputs) != len(costs.input_readers):  # some share a storage
        inputs = [_joined(inputs)] * len(costs.input_readers)
    nodes = (_joined([needs[v] for v in stored_in]) for stored_in in costs.results)
    return Needs(nodes=tuple(nodes), inputs=tuple(inputs))


def releases(value: Received, starts: Sequence[int]) -> Iterator[IntervalCorrection]:
    """Corrections for stages, from one of ``starts`` on, that free a copy before their forward ends.

    A copy is freed after its last use in the stage, by a reader or through a reader's view, unless it is
    needed by the stage's backward or by a view that a later stage reads. Each correction covers the stages
    that end between one use and the next.
    """
    producer, readers, need, kept = value.producer, value.readers, value.need, value.need.kept
    if bisect_right(starts, producer) == bisect_right(starts, readers[-1]):
        return  # no stage receives it
    if set(readers).issubset(kept):  # every reader saves it for backward, as with most values
        return
    reading = set(readers)
    uses = sorted({*reading, *need.used[bisect_right(need.used, producer) :]})
    last = -1  # the last reader so far; the value may be used through a view that it returned
    views = iter([*need.lent, (NEVER, NEVER)])
    made, end = next(views)
    # Views up to a use, the latest last; from there those are dropped that are over
    lent = [(-1, NEVER)]
    for use, following in pairwise([*uses, NEVER]):
        last = use if use in reading else last
        while made <= use:
            lent.append((made, end))
            made, end = next(views)
        while lent[-1][1] <= use:
            lent.pop()
        count = bisect_right(kept, use)
        first = max(producer, kept[count - 1] if count else -1, lent[-1][0]) + 1
        if first <= last:
            yield IntervalCorrection(
                first=first,
                last=last,
                begin=use + 1,
                until=following + 1,
                sender=following,
                nbytes=-value.nbytes,
            )


def _joined(needs: Sequence[Need]) -> Need:
    if len(needs) == 1:
        return needs[0]
    return Need(
        kept=tuple(sorted({node for need in needs for node in need.kept})),
        used=tuple(sorted({node for need in needs for node in need.used})),
        lent=tuple(sorted({result for need in needs for result in need.lent})),
    )


def _need(
    costs: CostTable, value: StoredValue, place: Sequence[int], lent: Sequence[tuple[int, int]]
) -> Need:
    def keeps(node: int) -> bool:
        key = costs.keys[node] if node < len(costs.keys) else None
        if key is None:
            return node in value.savers
        return key.recompute and not key.offload

    users = {*value.users, *value.savers}
    return Need(
        kept=tuple(sorted([place[node] for node in users if keeps(node)])),
        used=tuple(sorted([place[node] for node in users])),
        lent=tuple(sorted(lent)),
    )
