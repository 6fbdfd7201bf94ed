"""What a device peaks at when it holds several stages that are not next to each other.

With one micro-batch its stages run forward in turn, and backward in turn the other way. While one of
them runs, the earlier ones hold what they saved, and in forward what later stages, on any device, have
yet to read; the later ones have left their parameters' gradients and the activation gradients that
nobody has taken yet: those of skips whose values were made before. A part of a larger gradient (a
concatenation's) keeps the whole of it there as long as its home is on the same device. The bound is on
the safe side where copies could be one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.partition.score import IntervalTables, OptimizerBytes

Table = NDArray[np.float64]
Span = tuple[int, int]  # a stage, from one cut (index) up to another


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
        optimizer: OptimizerBytes | None,
    ) -> None:
        static = tables.parameters + tables.buffers
        kept = np.zeros_like(static)
        if optimizer is not None:
            static, kept = static + optimizer.state * tables.owned, tables.owned
        self._static = static
        self._forward = static + tables.forward_live
        self._optimizer = optimizer
        self._owned, self._updating = tables.owned, tables.updating
        self.running = static + np.maximum(tables.forward_live, tables.backward_live_growing)
        self.held = static + tables.saved
        self.left = static + kept
        cell_of = _cells(tables.cuts, nodes)
        count = len(tables.cuts)
        self.needed, self._surplus = (np.zeros((count, count)) for _ in range(2))
        for gradient in costs.gradients:
            at = int(cell_of[gradient.home]) + 1, int(cell_of[gradient.sender]) + 1
            if at[0] < at[1]:
                self.needed[at] += gradient.nbytes - gradient.surplus
                self._surplus[at] += gradient.surplus
        for table in (self.needed, self._surplus):
            np.cumsum(table, axis=0, out=table)
            np.cumsum(table, axis=1, out=table)
        # Of values that a stage may make and neither save nor read last: where they are made, saved
        # first and read last, and their bytes.
        passing = []
        for value in costs.values:
            if value.producer >= 0 and value.users:
                made, last = int(cell_of[value.producer]), int(cell_of[list(value.users)].max())
                saved = int(cell_of[list(value.savers)].min()) if value.savers else count
                if made < min(saved, last):
                    passing.append((made, saved, last, value.nbytes))
        self._passing = np.array(passing).reshape(-1, 4).T

    def peak(self, spans: Sequence[Span]) -> float:
        """The peak of the device that holds the stages ``spans``, in their order. O(stages ** 3)."""
        most = 0.0
        for i, (x, y) in enumerate(spans):
            before, after = spans[:i], spans[i + 1 :]
            held = sum(float(self.held[a, b - 1]) for a, b in before)
            left = sum(float(self.left[a, b - 1]) for a, b in after)
            left += sum(_between(self.needed, (0, y), later) for later in after)
            for j, home in enumerate(spans[: i + 1]):
                later = spans[max(i, j + 1) :]
                left += sum(_between(self._surplus, home, sender) for sender in later)
            passing = sum(self._passed_on(span, y) for span in before)
            static = sum(float(self._static[a, b - 1]) for a, b in after)
            forward = float(self._forward[x, y - 1]) + held + static + passing
            most = max(most, forward, float(self.running[x, y - 1]) + held + left)
        if self._optimizer is None:
            return most
        state = sum(float(self.left[a, b - 1]) for a, b in spans)
        owned = sum(float(self._owned[a, b - 1]) for a, b in spans)
        updating = max(float(self._updating[a, b - 1]) for a, b in spans)
        return max(most, state + self._optimizer.together * owned + self._optimizer.each * updating)

    def _passed_on(self, home: Span, later: int) -> float:
        """Made in the stage ``home``, not saved there, and read by stages from cut ``later`` on."""
        made, saved, last, nbytes = self._passing
        here = (made >= home[0]) & (made < home[1]) & (saved >= home[1]) & (last >= later)
        return float(nbytes[here].sum())


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
