"""Estimates the peak memory of a device with several stages that are not neighbours, for one micro-batch.

The stages run forward one after the other, and backward in reverse order. While one of them runs, earlier
stages keep what they have saved. During backward, the stages after it have left behind the gradients of
their parameters and pending gradients of skip connections from earlier stages (a copy of each part, for the
gradient of a concatenation). Several of these copies may be one tensor; left out are values that are not
saved and that later stages have not read yet in forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.partition.stage_cost.optimizer import OptimizerMemory
from placer.partition.stage_cost.order_bytes import LOSS_NBYTES
from placer.partition.stage_cost.tables import IntervalTables

Table = NDArray[np.float64]
Span = tuple[int, int]  # a stage, as the indices of the cuts where it begins and ends


class SharedPeaks:
    """Peaks, in bytes, of devices with several stages of one order; one micro-batch in training.

    For the stage from cut x to cut y, ``running[x, y - 1]`` is the most bytes while it runs,
    ``retained[x, y - 1]`` its bytes while a later stage runs, and ``left[x, y - 1]`` its bytes after its
    backward. Without ``optimizer``, they are for a replica other than the first, which has no optimizer state
    and no gradients after a backward.
    """

    def __init__(
        self,
        tables: IntervalTables,
        costs: CostTable,
        nodes: Sequence[int],
        optimizer: OptimizerMemory | None,
    ) -> None:
        static = tables.state.kept(optimizer)
        kept = np.zeros_like(static) if optimizer is None else tables.state.kept_gradients
        self._static = static
        self._forward = static + tables.forward_live
        self._optimizer = optimizer
        self._gradients, self._updating = tables.state.kept_gradients, tables.state.updating
        self._backward = static + tables.backward_live_growing
        self.running = np.maximum(self._forward, self._backward)
        self.retained = static + tables.saved
        self.bytes_after_backward = static + kept
        self.bytes_after_backward[:, -1] += LOSS_NBYTES
        cell_of = _cells(tables.cuts, nodes)
        count = len(tables.cuts)
        self.needed = np.zeros((count, count))
        for gradient in costs.gradients:
            # If a gradient is split, its parts are pending as copies. If it is needed whole, it is one tensor
            # for all its readers.
            own = (gradient.home, gradient.nbytes - gradient.surplus)
            others = gradient.earlier if gradient.surplus else ()
            for home, nbytes in (own, *others):
                at = int(cell_of[home]) + 1, int(cell_of[gradient.sender]) + 1
                if at[0] < at[1]:
                    self.needed[at] += nbytes
        np.cumsum(self.needed, axis=0, out=self.needed)
        np.cumsum(self.needed, axis=1, out=self.needed)

    def peak(self, spans: Sequence[Span]) -> float:
        """Peak bytes of a device with the stages ``spans``, in order. Takes O(stages ** 3) time."""
        most, retained = 0.0, 0.0
        for i, (x, y) in enumerate(spans):
            after = spans[i + 1 :]
            forward = float(self._forward[x, y - 1]) + retained
            backward = float(self._backward[x, y - 1]) + retained
            if after:
                forward += sum(float(self._static[a, b - 1]) for a, b in after)
                left = sum(float(self.bytes_after_backward[a, b - 1]) for a, b in after)
                backward += left + sum(_between(self.needed, (0, y), later) for later in after)
            most = max(most, forward, backward)
            retained += float(self.retained[x, y - 1])
        if self._optimizer is None:
            return most
        return max(most, self._in_optimizer(spans, self._optimizer))

    def at_least(self, spans: Sequence[Span]) -> float:
        """A cheap lower bound on `peak`: ignores values and pending gradients for other stages."""
        most, retained = 0.0, 0.0
        left = [float(self.bytes_after_backward[x, y - 1]) for x, y in spans]
        for i, (x, y) in enumerate(spans):
            backward = float(self._backward[x, y - 1]) + retained + sum(left[i + 1 :])
            most = max(most, float(self._forward[x, y - 1]) + retained, backward)
            retained += float(self.retained[x, y - 1])
        return most

    def _in_optimizer(self, spans: Sequence[Span], optimizer: OptimizerMemory) -> float:
        state = sum(float(self.bytes_after_backward[a, b - 1]) for a, b in spans)
        gradients = sum(float(self._gradients[a, b - 1]) for a, b in spans)
        updating = max(float(self._updating[a, b - 1]) for a, b in spans)
        return state + optimizer.together * gradients + optimizer.each * updating


def _between(table: Table, home: Span, sender: Span) -> float:
    """The sum of ``table`` over the pairs whose home is in one stage and whose sender is in the other."""
    (a, b), (x, y) = home, sender
    return float(table[b, y] - table[a, y] - table[b, x] + table[a, x])


def _cells(cuts: Sequence[int], nodes: Sequence[int]) -> NDArray[np.int64]:
    """The index of the last cut before each node and before the loss."""
    cell_of = np.empty(len(nodes) + 1, dtype=np.int64)
    cell_of[list(nodes)] = np.searchsorted(cuts, np.arange(len(nodes)), side="right") - 1
    cell_of[-1] = len(cuts) - 2
    return cell_of
