"""Estimates the slowest of many stages along program order, from sums over nodes."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from placer.cost import CostTable
from placer.machine.catalogue import DeviceKind

_PRECISION = 1e-2  # relative, of the slowest stage's seconds
_NEAR = 1.3  # most often the slowest stage takes less than so many times the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the stages of a chain may need.

    ``in_flight`` has the micro-batches of which each stage keeps activations, ``waiting`` those between the
    halves of a split backward, ``room`` the bytes of a device. ``state`` and ``updating`` are the bytes that
    a byte of a trained parameter takes: with its gradient and the optimizer's state, and during the
    optimizer's step. ``recomputes``: a stage may recompute what it must.
    """

    in_flight: Sequence[int]
    waiting: Sequence[int]
    room: float
    state: float
    updating: float
    recomputes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Sums over the nodes before each one, in program order: seconds of a micro-batch, and bytes.

    A stage from node a to node b takes the differences of entries b and a. ``crossing`` has the bytes of
    the values that are made before each node, and read from it on.
    """

    forward: Sequence[float]
    both: Sequence[float]  # forward and backward
    launching: Sequence[float]
    saved: Sequence[float]
    waiting: Sequence[float]  # gradients between the halves of a split backward
    frozen: Sequence[float]
    trained: Sequence[float]
    crossing: Sequence[float]

    @staticmethod
    def of(costs: CostTable, kind: DeviceKind, *, training: bool) -> Chain:
        """The sums for the nodes of ``costs`` on a device of this kind."""
        count = len(costs.nodes)
        seconds = costs.work.seconds(kind)
        forward, backward = (part.device for part in (seconds.forward, seconds.backward))
        saved, frozen, trained, crossing = np.zeros((4, count))
        for value in costs.values:
            if value.savers and value.producer >= 0:
                saved[value.producer] += value.nbytes
        for tensor in costs.state:
            first = min(tensor.readers, default=0)
            (trained if tensor.trained and training else frozen)[first] += tensor.nbytes
        # Their gradients wait for the end of a backward (`placer.partition.stage_cost.tables`).
        frozen += [2 * node.cast_nbytes for node in costs.nodes]
        for node, readers in enumerate(costs.readers):
            if readers:
                crossing[node] += costs.nodes[node].output_nbytes
                crossing[max(readers)] -= costs.nodes[node].output_nbytes
        return Chain(
            forward=_before(forward),
            both=_before(forward + training * backward),
            launching=_before(seconds.forward.host + training * seconds.backward.host),
            saved=_before(saved),
            waiting=_before(np.array(costs.waiting_nbytes, dtype=float)),
            frozen=_before(frozen),
            trained=_before(trained),
            crossing=_before(crossing),
        )

    def plus(self, other: Chain, factor: float) -> Chain:
        """The sums with ``factor`` times those of ``other`` added."""
        added = {}
        for field in fields(self):
            pairs = zip(getattr(self, field.name), getattr(other, field.name), strict=True)
            added[field.name] = [own + factor * more for own, more in pairs]
        return Chain(**added)

    def slowest_seconds(self, limits: Limits) -> float | None:
        """The least seconds of the slowest stage for a micro-batch within ``limits``; None if nothing fits.

        By bisection: stages that are as long as a number of seconds allows tell whether these are enough.
        """
        low = max(self.both[-1], self.launching[-1]) / len(limits.in_flight)
        high = max(self.both[-1] + self.forward[-1] * limits.recomputes, self.launching[-1])
        high *= 1 + _PRECISION
        if not self._is_enough(high, limits):
            return None
        while high - low > _PRECISION * low:
            seconds = min((low + high) / 2, low * _NEAR)
            if self._is_enough(seconds, limits):
                high = seconds
            else:
                low = seconds
        return high

    def _is_enough(self, seconds: float, limits: Limits) -> bool:
        """Do stages of at most so many seconds reach the last node?"""
        start, last = 0, len(self.both) - 1
        for counts in zip(limits.in_flight, limits.waiting, strict=True):
            end = bisect_right(self.both, self.both[start] + seconds) - 1
            end = min(end, bisect_right(self.launching, self.launching[start] + seconds) - 1)
            too_large = partial(self._is_too_large, start, counts, seconds, limits)
            if too_large(end):
                end = bisect_left(range(end), True, lo=start + 1, key=too_large) - 1
            if end in (start, last):
                return end == last
            start = end
        return False

    def _is_too_large(
        self, start: int, counts: tuple[int, int], seconds: float, limits: Limits, end: int
    ) -> bool:
        """Does the stage need more bytes than there are, whatever it recomputes in the seconds left?"""
        frozen = self.frozen[end] - self.frozen[start]
        trained = self.trained[end] - self.trained[start]
        in_flight, halfway = counts
        saved = in_flight * (self.saved[end] - self.saved[start])
        waiting = halfway * (self.waiting[end] - self.waiting[start])
        if frozen + limits.updating * trained > limits.room:
            return True
        excess = frozen + limits.state * trained + saved + waiting - limits.room
        if excess <= 0 or not limits.recomputes:
            return excess > 0
        # What is recomputed keeps what enters the stage.
        spared = saved - in_flight * self.crossing[start]
        forward = self.forward[end] - self.forward[start]
        left = seconds - (self.both[end] - self.both[start])
        return excess * forward > min(left, forward) * spared


def _before(values: np.ndarray) -> list[float]:
    return list(itertools.accumulate(values.tolist(), initial=0.0))
