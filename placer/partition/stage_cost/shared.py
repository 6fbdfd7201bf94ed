"""What a device peaks at when it holds several stages that are not next to each other.

With one micro-batch its stages run forward in turn, and backward in turn the other way. While one of
them runs, the earlier ones hold what they saved, and in forward what later stages, on any device, have
yet to read; the later ones have left their parameters' gradients and the activation gradients that
nobody has taken yet: those of skips whose values were made before, of a concatenation's gradient a copy
of each part. The sum is on the safe side where copies could be one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.partition.stage_cost.live_through import PassedOn, Span
from placer.partition.stage_cost.score import OptimizerMemory
from placer.partition.stage_cost.tables import LOSS_NBYTES, IntervalTables

Table = NDArray[np.float64]


class SharedPeaks:
    """Peaks, in bytes, of devices that hold several stages of one order; one micro-batch in training.

    ``running[x, y - 1]`` is the most that a stage from cut x up to cut y holds while it runs,
    ``held`` what it holds while a later stage does, ``left`` what is left when its backward has ended.
    A further replica (``optimizer`` None) keeps no optimizer state, and its gradients go home.
    """

    def __init__(
        self,
        tables: IntervalTables,
        costs: CostTable,
        nodes: Sequence[int],
        optimizer: OptimizerMemory | None,
    ) -> None:
        static = tables.parameters + tables.buffers
        kept = np.zeros_like(static)
        if optimizer is not None:
            static, kept = static + optimizer.state * tables.owned, tables.owned
        self._static = static
        self._forward = static + tables.forward_live
        self._optimizer = optimizer
        self._owned, self._updating = tables.owned, tables.updating
        self._backward = static + tables.backward_live_growing
        self.running = np.maximum(self._forward, self._backward)
        self.held = static + tables.saved
        self.left = static + kept
        self.left[:, -1] += LOSS_NBYTES
        cell_of = _cells(tables.cuts, nodes)
        count = len(tables.cuts)
        self.needed = np.zeros((count, count))
        for gradient in costs.gradients:
            # What splits a gradient hands every part to another stage as a copy of its own; where
            # all is needed, one tensor waits for all.
            needed = (gradient.home, gradient.nbytes - gradient.surplus)
            others = gradient.earlier if gradient.surplus else ()
            for home, nbytes in (needed, *others):
                at = int(cell_of[home]) + 1, int(cell_of[gradient.sender]) + 1
                if at[0] < at[1]:
                    self.needed[at] += nbytes
        np.cumsum(self.needed, axis=0, out=self.needed)
        np.cumsum(self.needed, axis=1, out=self.needed)
        self._passed_on = PassedOn(costs, cell_of)

    def peak(self, spans: Sequence[Span]) -> float:
        """The peak of the device that holds the stages ``spans``, in their order. O(stages ** 3)."""
        most, held = 0.0, 0.0
        for i, (x, y) in enumerate(spans):
            before, after = spans[:i], spans[i + 1 :]
            passing, whole, kept_whole = 0.0, 0.0, 0.0
            if before:
                passing = sum(self._passed_on.unsaved(span, y) for span in before)
                whole, kept_whole = self._passed_on.beside_parts(before, (x, y))
            forward = float(self._forward[x, y - 1]) + held + passing + whole
            backward = float(self._backward[x, y - 1]) + held + kept_whole
            if after:
                forward += sum(float(self._static[a, b - 1]) for a, b in after)
                left = sum(float(self.left[a, b - 1]) for a, b in after)
                backward += left + sum(_between(self.needed, (0, y), later) for later in after)
            most = max(most, forward, backward)
            held += float(self.held[x, y - 1]) + kept_whole
        if self._optimizer is None:
            return most
        return max(most, self._in_optimizer(spans, self._optimizer))

    def at_least(self, spans: Sequence[Span]) -> float:
        """A lower bound on `peak` that is quick to find: without what is held for other stages."""
        most, held = 0.0, 0.0
        left = [float(self.left[x, y - 1]) for x, y in spans]
        for i, (x, y) in enumerate(spans):
            backward = float(self._backward[x, y - 1]) + held + sum(left[i + 1 :])
            most = max(most, float(self._forward[x, y - 1]) + held, backward)
            held += float(self.held[x, y - 1])
        return most

    def _in_optimizer(self, spans: Sequence[Span], optimizer: OptimizerMemory) -> float:
        state = sum(float(self.left[a, b - 1]) for a, b in spans)
        owned = sum(float(self._owned[a, b - 1]) for a, b in spans)
        updating = max(float(self._updating[a, b - 1]) for a, b in spans)
        return state + optimizer.together * owned + optimizer.each * updating


def _between(table: Table, home: Span, sender: Span) -> float:
    """What is summed in ``table`` for homes in the one stage and senders in the other."""
    (a, b), (x, y) = home, sender
    return float(table[b, y] - table[a, y] - table[b, x] + table[a, x])


def _cells(cuts: Sequence[int], nodes: Sequence[int]) -> NDArray[np.int64]:
    """Between which cuts every node is; the loss is with the last."""
    cell_of = np.empty(len(nodes) + 1, dtype=np.int64)
    cell_of[list(nodes)] = np.searchsorted(cuts, np.arange(len(nodes)), side="right") - 1
    cell_of[-1] = len(cuts) - 2
    return cell_of
