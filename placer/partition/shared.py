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
from placer.partition.score import LOSS_NBYTES, IntervalTables, OptimizerBytes

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
        self._passing = _Passing(costs, cell_of)

    def peak(self, spans: Sequence[Span]) -> float:
        """The peak of the device that holds the stages ``spans``, in their order. O(stages ** 3)."""
        most = 0.0
        for i, (x, y) in enumerate(spans):
            before, after = spans[:i], spans[i + 1 :]
            held = sum(float(self.held[a, b - 1]) for a, b in before)
            left = sum(float(self.left[a, b - 1]) for a, b in after)
            left += sum(_between(self.needed, (0, y), later) for later in after)
            passing = sum(self._passing.nbytes(span, y) for span in before)
            static = sum(float(self._static[a, b - 1]) for a, b in after)
            forward = float(self._forward[x, y - 1]) + held + static + passing
            most = max(most, forward, float(self.running[x, y - 1]) + held + left)
        if self._optimizer is None:
            return most
        state = sum(float(self.left[a, b - 1]) for a, b in spans)
        owned = sum(float(self._owned[a, b - 1]) for a, b in spans)
        updating = max(float(self._updating[a, b - 1]) for a, b in spans)
        return max(most, state + self._optimizer.together * owned + self._optimizer.each * updating)


class _Passing:
    """The storages that stages hold for what later ones read: made there or, as a view, received."""

    def __init__(self, costs: CostTable, cell_of: NDArray[np.int64]) -> None:
        # (storage, where a result that lies in it is made) -> where that is read last
        last_read: dict[tuple[int, int], int] = {}
        for node, (held, readers) in enumerate(zip(costs.results, costs.readers, strict=True)):
            made, last = int(cell_of[node]), int(cell_of[list(readers)].max(initial=-1))
            if made < last:
                for value in held:
                    last_read[value, made] = max(last, last_read.get((value, made), -1))
        numbers = {value: i for i, value in enumerate(sorted({value for value, _ in last_read}))}
        saved = [(numbers[v], int(cell_of[i])) for v in numbers for i in costs.values[v].savers]
        made_in = [(numbers[value], made, last) for (value, made), last in last_read.items()]
        self._results = np.array(made_in, dtype=np.int64).reshape(-1, 3).T
        self._savers = np.array(saved, dtype=np.int64).reshape(-1, 2).T
        self._nbytes = np.array([costs.values[value].nbytes for value in numbers], dtype=float)

    def nbytes(self, home: Span, later: int) -> float:
        """Bytes that the stage ``home`` does not save, and holds for readers from cut ``later`` on."""
        value, made, last = self._results
        held = np.zeros(len(self._nbytes), dtype=bool)
        held[value[(made >= home[0]) & (made < home[1]) & (last >= later)]] = True
        value, at = self._savers
        held[value[(at >= home[0]) & (at < home[1])]] = False
        return float(self._nbytes[held].sum())


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
