"""Counts pending gradients: gradients of skip connections that have been computed but not used yet.

``home`` is the node whose result the gradient belongs to. ``source`` is the node whose backward computes it,
and ``sender`` the node that passes it on: ``source``, or a node that splits the gradient of a concatenation.
``target`` is the last node that adds to it: ``home``, or another reader of the result. Tables have a row
for each start of a stage and a column for each node whose backward runs:

    stage with target and sender   pending in columns target + 1 … source - 1
    stage with sender, no target   a copy of the needed part, from the sender's column to the start
    stage with target, no sender   received when the backward of ``home`` runs, so never pending

This models `placer.executor.places.transfer.PendingGradients`.

Whether a stage has a sender depends on where the stage ends. The tables assume that it has all senders; an
`IntervalCorrection` is the difference for stages that end before a sender.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.cost import AddedGradient, CostTable, PendingGradient
from placer.regions import RegionKey

_BLOCK = 64  # columns in a block; 16 to 128 were about equally fast for 2,600 columns

Add = Callable[[int, int, int, int, float], None]  # (first start, last start, column, until, bytes)
LiveFrom = Callable[[int, int], Iterable[tuple[int, int]]]


class IntervalCorrection(NamedTuple):
    """Correction for intervals that exclude ``sender``: they end at or before it.

    ``nbytes`` (may be negative) is added to columns ``begin`` … ``until`` - 1 of the intervals that start at
    ``first`` … ``last``.
    """

    first: int
    last: int
    begin: int
    until: int
    sender: int
    nbytes: float


def pending_gradients(
    costs: CostTable, place: Sequence[int], add: Add, *, live_from: LiveFrom | None = None
) -> list[IntervalCorrection]:
    """Fill a table for stages that have all senders; return the corrections for other stages.

    ``add(first start, last start, column, until, nbytes)`` adds to the table. ``place`` has the position of
    each node. ``live_from(value, column)`` yields the (first, last) starts of stages that keep a value for a
    region from this column on. Takes O(parts of gradients) time.
    """
    filling = _Filling(costs, place, add)
    # (node, home) -> the first sender of a gradient that is added at the node
    sender_of: dict[tuple[int, int], int] = {}
    # (node, home) -> the last source of such a gradient, if all sources come before the node in this order
    source_of: dict[tuple[int, int], int] = {}
    for gradient in costs.gradients:
        sum_at = gradient.target, gradient.home
        source = place[gradient.source]
        if place[gradient.target] < source:
            filling.count(gradient)
            sender = place[gradient.sender]
            sender_of[sum_at] = min(sender, sender_of.get(sum_at, sender))
        else:
            source_of[sum_at] = max(source, source_of.get(sum_at, source))
    # node -> values that other nodes save as well
    shared: dict[int, list[_SharedValue]] = defaultdict(list)
    for index, value in enumerate(costs.values):
        if len(value.savers) > 1:
            found = _shared_value(index, costs, place)
            for saver in value.savers:
                shared[saver].append(found)
    for sum_ in costs.added:
        home, node = place[sum_.home], place[sum_.node]
        if home >= node:
            continue
        sum_at = sum_.node, sum_.home
        sender = sender_of.get(sum_at, node)
        # A stage that starts after the sources has nothing to add to the node's gradient.
        last_start = node if sum_at in sender_of else source_of.get(sum_at, node)
        for first, last, nbytes in _beside_sum(sum_, shared[sum_.node], costs, place, live_from):
            last = min(last, last_start)
            if first <= last:
                add(first, last, node, node + 1, nbytes)
                filling.change(max(first, home + 1), last, node, node + 1, sender, -nbytes)
    return filling.corrections


class _Filling:
    """Adds pending gradients to a table for stages with all senders; collects corrections for the others."""

    def __init__(self, costs: CostTable, place: Sequence[int], add: Add) -> None:
        self._costs = costs
        self._place = place
        self._add = add
        self.corrections: list[IntervalCorrection] = []
        # node -> bytes that only this node saves
        self._saved_alone: dict[int, int] = defaultdict(int)
        for value in costs.values:
            if len(value.savers) == 1:
                self._saved_alone[value.savers[0]] += value.nbytes

    def change(
        self, first: int, last: int, begin: int, until: int, sender: int, nbytes: float
    ) -> None:
        """Record an `IntervalCorrection` with these fields, unless it would apply to nothing."""
        if nbytes and first <= last and begin < until:
            self.corrections.append(
                IntervalCorrection(
                    first=first, last=last, begin=begin, until=until, sender=sender, nbytes=nbytes
                )
            )

    def count(self, gradient: PendingGradient) -> None:
        """Count a gradient by the rules in this module's docstring."""
        source, sender = self._place[gradient.source], self._place[gradient.sender]
        target, home = self._place[gradient.target], self._place[gradient.home]
        whole, needed = gradient.nbytes, gradient.nbytes - gradient.surplus

        # The stage has the target.
        self._add(0, target, target + 1, source, whole)
        self.change(0, target, target + 1, source, sender, -whole)
        if home == target:
            self.change(0, home, target, target + 1, sender, -gradient.surplus)
        else:  # received at home, not at the target, beside the sum over the readers in the stage
            self.change(0, home, target, target + 1, sender, -whole)
            cost = self._costs.nodes[gradient.home]
            saved = self._saved_alone[gradient.home]
            room = cost.backward_transient - cost.backward_incoming - saved
            self.change(0, home, home, home + 1, sender, max(0, needed - room))

        if gradient.of_weight:
            return  # a stage without the target has a copy of the weight, and this is the copy's own gradient

        # The stage has the sender, but not the target: a copy, made while the whole is still alive.
        def pass_on(to: int, nbytes: float) -> None:
            until = sender + (gradient.surplus > 0)
            self._add(to + 1, sender, 0, until, nbytes)
            self.change(to + 1, sender, 0, until, sender, -nbytes)

        pass_on(target, needed)
        last = sender  # the last node of the stage that needs a part of it
        for to, nbytes in sorted(((self._place[t], b) for t, b in gradient.earlier), reverse=True):
            self.change(0, to, to, to + 1, sender, nbytes)  # without the sender, a copy is received
            if not gradient.surplus:
                continue  # with the sender, one tensor is pending for all
            pass_on(to, nbytes)
            if to < target:  # the nodes are in another order than in the recorded run
                continue
            self._add(to + 1, last, last, source, whole)
            self.change(to + 1, last, last, source, sender, -whole)
            last = to
        if gradient.surplus:
            self._add(target + 1, last, last, source, whole)
            self.change(target + 1, last, last, source, sender, -whole)


class _SharedValue(NamedTuple):
    """A value that several nodes save, with their sorted positions by the region that they are in."""

    number: int
    nbytes: int
    savers: Mapping[RegionKey | None, Sequence[int]]
    is_recomputed: bool  # by one of these regions


def _shared_value(number: int, costs: CostTable, place: Sequence[int]) -> _SharedValue:
    value = costs.values[number]
    savers: dict[RegionKey | None, list[int]] = defaultdict(list)
    for saver in value.savers:
        savers[_key_of(saver, costs)].append(place[saver])
    return _SharedValue(
        number=number,
        nbytes=value.nbytes,
        savers={key: sorted(positions) for key, positions in savers.items()},
        is_recomputed=any(key is not None and key.recompute for key in savers),
    )


def _key_of(node: int, costs: CostTable) -> RegionKey | None:
    return costs.keys[node] if node < len(costs.keys) else None


def _beside_sum(
    added: AddedGradient,
    shared: Sequence[_SharedValue],
    costs: CostTable,
    place: Sequence[int],
    live_from: LiveFrom | None,
) -> Iterator[tuple[int, int, float]]:
    """Yields the bytes that a sum of gradients adds, as (first start, last start, bytes).

    Values that the node has saved and that no earlier node of the stage needs are freed before gradients are
    added. ``shared`` are the values that both this node and others save.
    """
    node = place[added.node]
    own = _key_of(added.node, costs)
    # start of a stage -> change of the freed bytes, compared with the previous start
    steps: dict[int, float] = defaultdict(float)
    for value in shared:
        if value.is_recomputed:
            for first, last in live_from(value.number, node) if live_from is not None else ():
                steps[first] += value.nbytes
                steps[last + 1] -= value.nbytes
            continue
        # An offloaded region fetches its own copy, which only its savers need.
        savers = value.savers[own]
        earlier = bisect_left(savers, node)
        steps[savers[earlier - 1] + 1 if earlier else 0] += value.nbytes
    released = 0.0
    starts = sorted({0, *(start for start in steps if start <= node)})
    nbytes = float(added.nbytes)
    for first, following in pairwise([*starts, node + 1]):
        released += steps.get(first, 0.0)
        yield first, following - 1, max(added.before_sum, nbytes - released)


def largest_up_to(
    table: NDArray[np.float64],
    starts: Sequence[int],
    ends: Sequence[int],
    corrections: Sequence[IntervalCorrection],
) -> NDArray[np.float64]:
    """The largest value in columns start … end - 1 after ``corrections``, for each start and end.

    ``starts`` and ``ends`` must be ascending. Corrections whose sender is between one end and the next stop
    applying there, and most of them concern nearby columns. So the maxima of blocks of columns are stored,
    and only those of changed blocks are recomputed. Takes O(starts * (columns + sum over ends of (blocks +
    columns in changed blocks))) time.
    """
    first, width = np.asarray(starts), table.shape[1]
    # Transposed, so that a block is contiguous in memory.
    current = np.where(np.arange(width)[:, None] >= first[None, :], table.T, -np.inf)
    pending = _that_matter(first, np.asarray(ends), corrections)
    for _, columns, stages, nbytes in pending:
        current[columns, stages] += nbytes
    blocks = np.full((-(-width // _BLOCK), len(starts)), -np.inf)
    found = np.empty((len(starts), len(ends)))
    before = 0
    for index, end in enumerate(ends):
        changed = set(range(before // _BLOCK, (end - 1) // _BLOCK + 1))
        while pending and pending[-1][0] < end:
            _, columns, stages, nbytes = pending.pop()
            current[columns, stages] -= nbytes
            changed.update(range(columns.start // _BLOCK, (columns.stop - 1) // _BLOCK + 1))
        for block in changed:
            inside = slice(block * _BLOCK, min(end, (block + 1) * _BLOCK))
            if inside.start < end:
                np.max(current[inside], axis=0, out=blocks[block])
        found[:, index] = blocks.max(axis=0)
        before = end
    return found


def _that_matter(
    starts: NDArray[np.int64], ends: NDArray[np.int64], corrections: Sequence[IntervalCorrection]
) -> list[tuple[int, slice, slice, float]]:
    """The sender, columns, rows and bytes of corrections of some stage's columns, the last sender first."""
    if not corrections:
        return []
    table = np.fromiter(chain.from_iterable(corrections), float).reshape(-1, 6)
    first, last, begin, until, sender = table[:, :5].astype(np.int64).T
    top, bottom = np.searchsorted(starts, first), np.searchsorted(starts, last + 1)
    # Stages with these starts have no columns before the first of them.
    begin = np.maximum(begin, starts[np.minimum(top, len(starts) - 1)])
    # Some stage has the first of these columns, and ends before the sender.
    ends_before = np.searchsorted(ends, begin, "right") < np.searchsorted(ends, sender, "right")
    found = np.flatnonzero((top < bottom) & (begin < until) & ends_before)
    found = found[np.argsort(-sender[found], kind="stable")]
    chosen = (each[found].tolist() for each in (sender, begin, until, top, bottom, table[:, 5]))
    return [(s, slice(b, u), slice(t, e), n) for s, b, u, t, e, n in zip(*chosen, strict=True)]
