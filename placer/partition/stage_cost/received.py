"""How long a stage needs the copies of values that it receives: for backward, or for their readers only."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable, StoredValue
from placer.partition.stage_cost.pending_gradients import IntervalCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What needs a result; positions of nodes, sorted.

    ``kept``: the nodes that save it for backward; ``used``: all that use it; ``lent``: results in the same
    storage, each with its last reader.
    """

    kept: tuple[int, ...]
    used: tuple[int, ...]
    lent: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What needs the result of every node, and every input of the model."""

    nodes: tuple[Need, ...]
    inputs: tuple[Need, ...]


def find_needs(costs: CostTable, place: NDArray[np.int64]) -> Needs:
    """The needs of all results; views of a storage need it too. ``place`` is per node its position."""
    lent: list[list[tuple[int, int]]] = [[] for _ in costs.values]
    for node, held in enumerate(costs.results):
        if costs.readers[node]:
            last = max(int(place[reader]) for reader in costs.readers[node])
            for value in held:
                lent[value].append((int(place[node]), last))
    needs = [_need(costs, v, place, results) for v, results in zip(costs.values, lent, strict=True)]
    inputs = [need for value, need in zip(costs.values, needs, strict=True) if value.producer < 0]
    if len(inputs) != len(costs.input_readers):  # some share a storage
        inputs = [_joined(inputs)] * len(costs.input_readers)
    nodes = (_joined([needs[value] for value in held]) for held in costs.results)
    return Needs(nodes=tuple(nodes), inputs=tuple(inputs))


def smaller_copies(
    costs: CostTable, place: NDArray[np.int64], starts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Where a stage receives parts of a storage only, and saves them.

    The start of the stage, its first node that saves a part, and the bytes that are not received.
    """
    for index, start, nbytes in copied_parts(costs, place, starts):
        value = costs.values[index]
        if any(costs.keys[i] for i in {*value.users, *value.savers} if i < len(costs.keys)):
            continue  # counted by `RegionLiveness`
        savers = (int(place[node]) for node in value.savers)
        first = min((saver for saver in savers if saver >= start), default=None)
        if first is not None:
            yield start, first, value.nbytes - nbytes


def copied_parts(
    costs: CostTable, place: NDArray[np.int64], starts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Values of which a stage receives parts only: the value, the start of the stage, bytes of the parts."""
    views: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # node, last reader, bytes
    for node, held in enumerate(costs.results):
        if len(held) == 1 and costs.readers[node]:
            last = max(int(place[reader]) for reader in costs.readers[node])
            views[held[0]].append((int(place[node]), last, costs.nodes[node].output_nbytes))
    whole_until = _whole_until(costs, place)
    for index, parts in views.items():
        value = costs.values[index]
        if min(nbytes for *_, nbytes in parts) >= value.nbytes:
            continue
        begin = max(whole_until[index], min(node for node, _, _ in parts))
        end = max(last for _, last, _ in parts)
        for start in starts[bisect_right(starts, begin) : bisect_right(starts, end)]:
            crossing = sum(nbytes for node, last, nbytes in parts if node < start <= last)
            if 0 < crossing < value.nbytes:
                yield index, start, crossing


def _whole_until(costs: CostTable, place: NDArray[np.int64]) -> list[float]:
    """Per storage the last node that reads or makes all of it: stages that start up to there have it all."""
    found = [float(place[v.producer]) if v.producer >= 0 else math.inf for v in costs.values]
    inputs = [index for index, value in enumerate(costs.values) if value.producer < 0]
    if len(inputs) == len(costs.input_readers):  # else some share a storage
        for index, readers in zip(inputs, costs.input_readers, strict=True):
            found[index] = float(max((place[node] for node in readers), default=-1))
    return found


def releases(
    producer: int, readers: Sequence[int], need: Need, nbytes: float
) -> Iterator[IntervalCorrection]:
    """Corrections for stages that free their copy of a result before they end.

    A copy is freed after its last use in the stage, by a reader or through a reader's view, unless the
    backward of the stage or a view for a later stage needs it. Each correction is for the stages that
    end between one use and the next.
    """
    kept = need.kept
    if set(readers).issubset(kept):  # backward needs it after every reader, as of most values
        return
    uses = sorted({*readers, *need.used[bisect_right(need.used, producer) :]})
    last = -1  # the reader, or the one whose view is used
    for use, following in pairwise([*uses, _NEVER]):
        last = use if use in readers else last
        count = bisect_right(kept, use)
        lent = max((made for made, end in need.lent if made <= use < end), default=-1)
        first = max(producer, kept[count - 1] if count else -1, lent) + 1
        if first <= last:
            yield IntervalCorrection(
                first=first,
                last=last,
                begin=use + 1,
                until=following + 1,
                sender=following,
                nbytes=-nbytes,
            )


_NEVER = 2**40  # a position after every stage


def _joined(needs: Sequence[Need]) -> Need:
    return Need(
        kept=tuple(sorted({node for need in needs for node in need.kept})),
        used=tuple(sorted({node for need in needs for node in need.used})),
        lent=tuple(sorted({result for need in needs for result in need.lent})),
    )


def _need(
    costs: CostTable,
    value: StoredValue,
    place: NDArray[np.int64],
    lent: Sequence[tuple[int, int]],
) -> Need:
    def keeps(node: int) -> bool:
        key = costs.keys[node] if node < len(costs.keys) else None
        if key is None:
            return node in value.savers
        return key.recompute and not key.offload

    users = {*value.users, *value.savers}
    return Need(
        kept=tuple(sorted(int(place[node]) for node in users if keeps(node))),
        used=tuple(sorted(int(place[node]) for node in users)),
        lent=tuple(sorted(lent)),
    )
