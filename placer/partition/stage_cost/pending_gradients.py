"""Counts pending gradients: those of skip connections that have been computed and not used yet.

For a gradient, ``source`` is the node whose backward computes it, and ``sender`` the node that passes it
on (``source``, or a node that splits the gradient of a concatenation). ``home`` is the node of whose result
it is the gradient, and ``target`` the last node that adds to it (``home``, or another reader of its
result). Tables have a row for each start of a stage and a column for each node whose backward runs:

    stage with target and sender   pending in columns target + 1 … source - 1
    stage with sender, no target   a copy of the needed part, from the sender's column to the start
    stage with target, no sender   received when the backward of ``home`` runs, so never pending

This models `placer.executor.transfer.PendingGradients`.

Whether a stage has a sender depends on its end. The tables are for stages that have all senders; an
`IntervalCorrection` is the difference for stages that end before a sender.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.cost import AddedGradient, CostTable, PendingGradient

_BLOCK = 64  # columns in a block; 16 to 128 were about equally fast for 2,600 columns

Add = Callable[[int, int, int, int, float], None]  # first start, last start, column, until, bytes
HeldFrom = Callable[[int, int], Iterable[tuple[int, int]]]


class IntervalCorrection(NamedTuple):
    """A correction for stages that end at or before ``sender`` and start at ``first`` … ``last``.

    ``nbytes`` (which may be negative) is added to their columns ``begin`` … ``until`` - 1.
    """

    first: int
    last: int
    begin: int
    until: int
    sender: int
    nbytes: float


def pending_gradients(
    costs: CostTable,
    place: NDArray[np.int64],
    add: Add,
    *,
    held_from: HeldFrom | None = None,
) -> list[IntervalCorrection]:
    """Fill a table, with ``add``, for stages that have all senders; returns corrections for other stages.

    ``place`` has the position of each node. ``held_from(value, column)`` returns the first and last starts
    of stages that keep a value for a region from this column on. O(parts of gradients).
    """
    filling = _Filling(costs, place, add)
    # for (node, home), the first sender of a gradient that is added at the node
    sender_of: dict[tuple[int, int], int] = {}
    # the last source of such a gradient, if in this order all sources come before the node
    source_of: dict[tuple[int, int], int] = {}
    for gradient in costs.gradients:
        sum_at = gradient.target, gradient.home
        source = int(place[gradient.source])
        if place[gradient.target] < source:
            filling.wait(gradient)
            sender = int(place[gradient.sender])
            sender_of[sum_at] = min(sender, sender_of.get(sum_at, sender))
        else:
            source_of[sum_at] = max(source, source_of.get(sum_at, source))
    # For each node, values that others save as well
    shared: dict[int, list[int]] = defaultdict(list)
    for index, value in enumerate(costs.values):
        for saver in value.savers if len(value.savers) > 1 else ():
            shared[saver].append(index)
    for sum_ in costs.added:
        home, node = int(place[sum_.home]), int(place[sum_.node])
        if home >= node:
            continue
        sum_at = sum_.node, sum_.home
        sender = sender_of.get(sum_at, node)
        # A stage that starts after the sources has nothing to add to the node's gradient.
        last_start = node if sum_at in sender_of else source_of.get(sum_at, node)
        for first, last, nbytes in _beside_sum(sum_, shared[sum_.node], costs, place, held_from):
            last = min(last, last_start)
            if first <= last:
                add(first, last, node, node + 1, nbytes)
                filling.change(max(first, home + 1), last, node, node + 1, sender, -nbytes)
    return filling.corrections


class _Filling:
    """Adds pending gradients to a table, for stages with all senders, and collects corrections for others."""

    def __init__(self, costs: CostTable, place: NDArray[np.int64], add: Add) -> None:
        self._costs = costs
        self._place = place
        self._add = add
        self.corrections: list[IntervalCorrection] = []
        # For each node, bytes that no other node saves
        self._saved_alone: dict[int, int] = defaultdict(int)
        for value in costs.values:
            if len(value.savers) == 1:
                self._saved_alone[value.savers[0]] += value.nbytes

    def change(
        self, first: int, last: int, begin: int, until: int, sender: int, nbytes: float
    ) -> None:
        """Add a correction for stages without the sender; arguments are as in `IntervalCorrection`."""
        if nbytes and first <= last and begin < until:
            self.corrections.append(
                IntervalCorrection(
                    first=first, last=last, begin=begin, until=until, sender=sender, nbytes=nbytes
                )
            )

    def wait(self, gradient: PendingGradient) -> None:
        """Count a gradient by the rules in the docstring of this module."""
        source, sender = int(self._place[gradient.source]), int(self._place[gradient.sender])
        target, home = int(self._place[gradient.target]), int(self._place[gradient.home])
        whole, needed = gradient.nbytes, gradient.nbytes - gradient.surplus

        # The stage has the target.
        self._add(0, target, target + 1, source, whole)
        self.change(0, target, target + 1, source, sender, -whole)
        if home == target:
            self.change(0, home, target, target + 1, sender, -gradient.surplus)
        else:  # it is received at home, not at the target, next to the sum of the readers in the stage
            self.change(0, home, target, target + 1, sender, -whole)
            cost = self._costs.nodes[gradient.home]
            saved = self._saved_alone[gradient.home]
            room = cost.backward_transient - cost.backward_incoming - saved
            self.change(0, home, home, home + 1, sender, max(0, needed - room))

        if gradient.of_weight:
            return  # in a stage without the target, it is the gradient of the stage's own parameter

        # The stage has the sender, but not the target: a copy, made while the whole is still alive.
        def pass_on(to: int, nbytes: float) -> None:
            until = sender + (gradient.surplus > 0)
            self._add(to + 1, sender, 0, until, nbytes)
            self.change(to + 1, sender, 0, until, sender, -nbytes)

        pass_on(target, needed)
        until = target  # the whole is freed after the backward of this node
        last = sender  # the last node of the stage that needs a part of it
        for to, nbytes in sorted(
            ((int(self._place[t]), b) for t, b in gradient.earlier), reverse=True
        ):
            self.change(0, to, to, to + 1, sender, nbytes)  # without the sender, a copy is received
            if to < target:  # the nodes are in another order than in the recorded run
                self.stay(0, to, to, until, sender, whole)
                if not gradient.surplus:
                    self.stay(to + 1, until, 0, until, sender, whole)
                until = to
            if not gradient.surplus:
                continue  # with the sender, one tensor is pending for all
            pass_on(to, nbytes)
            if to < target:
                continue
            self._add(to + 1, last, last, source, whole)
            self.change(to + 1, last, last, source, sender, -whole)
            last = to
        if gradient.surplus:
            self._add(target + 1, last, last, source, whole)
            self.change(target + 1, last, last, source, sender, -whole)

    def stay(
        self, first: int, last: int, begin: int, until: int, sender: int, nbytes: float
    ) -> None:
        """Count it in these columns of stages that start at first … last and have the sender."""
        if first <= last:
            self._add(first, last, begin, until, nbytes)
            self.change(first, last, begin, until, sender, -nbytes)


def _beside_sum(
    added: AddedGradient,
    shared: Sequence[int],
    costs: CostTable,
    place: NDArray[np.int64],
    held_from: HeldFrom | None,
) -> Iterator[tuple[int, int, float]]:
    """The bytes that a sum of gradients adds, as (first start, last start, bytes) of stages.

    Values that the node has saved, and that no earlier node of the stage needs, are freed before gradients
    are added. ``shared`` are the values that both the node and others save.
    """
    node = int(place[added.node])
    key_of = lambda i: costs.keys[i] if i < len(costs.keys) else None  # noqa: E731
    # For a start of a stage, the change of the bytes that are freed
    steps: dict[int, float] = defaultdict(float)
    for index in shared:
        value = costs.values[index]
        own, *keys = (key_of(saver) for saver in (added.node, *value.savers))
        if any(key is not None and key.recompute for key in (own, *keys)):
            for first, last in held_from(index, node) if held_from is not None else ():
                steps[first] += value.nbytes
                steps[last + 1] -= value.nbytes
            continue
        # What an offloaded region brings back is a copy of its own, which only its savers need.
        savers = zip(value.savers, keys, strict=True)
        positions = (int(place[s]) for s, key in savers if key == own)
        steps[max((p for p in positions if p < node), default=-1) + 1] += value.nbytes
    released = 0.0
    starts = sorted({0, *(start for start in steps if start <= node)})
    nbytes = float(added.nbytes)
    for first, following in pairwise([*starts, node + 1]):
        released += steps.get(first, 0.0)
        yield first, following - 1, max(added.waiting, nbytes - released)


def largest_up_to(
    table: NDArray[np.float64],
    starts: Sequence[int],
    ends: Sequence[int],
    corrections: Sequence[IntervalCorrection],
) -> NDArray[np.float64]:
    """For each start and end the largest value in columns start … end - 1, after ``corrections``.

    ``starts`` and ``ends`` must ascend. From one end to the next, the corrections of senders between them
    no longer apply, and most of these are for columns nearby. So the maxima of blocks of columns are kept,
    and only those of changed blocks are computed again. Takes O(starts * (columns + sum over ends of
    (blocks + columns in changed blocks))) time.
    """
    first, width = np.asarray(starts), table.shape[1]
    # Transposed, so that a block is contiguous in memory.
    current = np.where(np.arange(width)[:, None] >= first[None, :], table.T, -np.inf)
    pending: list[tuple[int, slice, slice, float]] = []
    rows = np.searchsorted(first, [(item.first, item.last + 1) for item in corrections])
    for item, (top, bottom) in zip(corrections, rows.reshape(-1, 2).tolist(), strict=True):
        begin = max(item.begin, int(first[top])) if top < bottom else item.until
        if begin >= item.until:  # stages with these starts have none of these columns
            continue
        if bisect_right(ends, begin) == bisect_right(ends, item.sender):
            continue  # no stage that has the first of these columns ends before the sender
        columns, stages = slice(begin, item.until), slice(top, bottom)
        current[columns, stages] += item.nbytes
        pending.append((item.sender, columns, stages, item.nbytes))
    pending.sort(key=lambda entry: -entry[0])
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
