"""How long the copies that a stage receives are needed: by backward, or only by their readers."""

from __future__ import annotations

import math
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
    """Positions, in order: of the nodes that keep a result for backward, and of all that use it.

    ``lent``: of results that lie in the same storage, and of their last readers.
    """

    kept: tuple[int, ...]
    used: tuple[int, ...]
    lent: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """How long every node's result, and every input of the model, is needed."""

    nodes: tuple[Need, ...]
    inputs: tuple[Need, ...]


def find_needs(costs: CostTable, place: NDArray[np.int64]) -> Needs:
    """From ``costs``, with ``place`` the position of every node; by storage, so that views count."""
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
    """Where a stage receives parts of a storage: its start, the first node of it that keeps a part
    for backward, and the bytes by which the parts are less than the storage.
    """
    for index, start, nbytes in copied_parts(costs, place, starts):
        value = costs.values[index]
        if any(costs.keys[i] for i in {*value.users, *value.savers} if i < len(costs.keys)):
            continue  # `HeldInRegions` counts it
        savers = (int(place[node]) for node in value.savers)
        first = min((saver for saver in savers if saver >= start), default=None)
        if first is not None:
            yield start, first, value.nbytes - nbytes


def copied_parts(
    costs: CostTable, place: NDArray[np.int64], starts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Values of which a stage receives only parts: the value, the stage's start, the parts' bytes."""
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
        for start in starts:
            if start > whole_until[index]:
                crossing = sum(nbytes for node, last, nbytes in parts if node < start <= last)
                if 0 < crossing < value.nbytes:
                    yield index, start, crossing


def _whole_until(costs: CostTable, place: NDArray[np.int64]) -> list[float]:
    """Per storage the last node that reads all of it, or makes it: stages up to there have it whole."""
    found = [float(place[v.producer]) if v.producer >= 0 else math.inf for v in costs.values]
    inputs = [index for index, value in enumerate(costs.values) if value.producer < 0]
    if len(inputs) == len(costs.input_readers):  # else some share a storage
        for index, readers in zip(inputs, costs.input_readers, strict=True):
            found[index] = float(max((place[node] for node in readers), default=-1))
    return found


def releases(
    producer: int, readers: Sequence[int], need: Need, nbytes: float
) -> Iterator[IntervalCorrection]:
    """Where a stage has dropped its copy of a result, by its last use in the stage.

    A copy that no backward of the stage needs, and no later stage a view of, goes after its last use
    there, by a reader or by what has a reader's view of it; each of the answers holds for the stages
    that end before the next use.
    """
    uses = sorted({*readers, *(use for use in need.used if use > producer)})
    last = -1  # the reader that the use is by, or whose view
    for use, following in pairwise([*uses, _NEVER]):
        last = use if use in readers else last
        kept = max((k for k in need.kept if k <= use), default=-1)
        lent = max((made for made, end in need.lent if made <= use < end), default=-1)
        first = max(producer, kept, lent) + 1
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
