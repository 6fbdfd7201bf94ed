"""Builds tables of bytes for all stages along one order at once, with one entry for each pair of cuts.

Tables are sums of rectangles (`placer.partition.stage_cost.order_bytes`), so each is a two-dimensional
prefix sum. Building them takes O(C * n + users) time and memory for C cuts and n nodes; a lookup takes O(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable, Work
from placer.partition.rectangles import NEVER, Rectangles, Table
from placer.partition.stage_cost.order_bytes import (
    LOSS_NBYTES,
    OrderBytes,
    by_position,
    find_order_bytes,
    positions_of,
)
from placer.partition.stage_cost.pending_gradients import IntervalCorrection, largest_up_to
from placer.partition.stage_cost.received import releases
from placer.partition.stage_cost.region_liveness import RegionLiveness
from placer.partition.stage_cost.state import StageState
from placer.plan.step_spans import BUCKET_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTables:
    """Bytes of all stages along an order; entry ``[x, y]`` is for the stage from cut x to cut y + 1."""

    cuts: tuple[int, ...]  # positions where a stage may begin or end; first 0, last n
    state: StageState
    saved: Table
    saved_fixed: Table  # the part of ``saved`` that does not depend on the rows of a micro-batch
    received: Table  # values from other stages and inputs of the model
    computed: Table  # the part of ``received`` that comes from other stages
    sent: Table
    forward_live: Table
    backward_live_growing: Table  # in the first backward, with gradients
    backward_live_grown: Table | None  # the same in later backwards; None if there are none
    work: Work  # the work of every node, to compute its seconds
    nodes: NDArray[np.int64]  # the order itself, with the loss last
    hosted: Table  # offloaded bytes of every node along the order
    results: Table  # results of the model
    waiting: Table  # gradients of every node along the order between the halves of a split backward

    @property
    def nbytes(self) -> int:
        """The size of all arrays, in bytes."""
        return sum(
            t.nbytes for f in fields(self) if isinstance(t := getattr(self, f.name), np.ndarray)
        )


def build_tables(
    costs: CostTable,
    order: Sequence[int],
    cuts: Sequence[int],
    *,
    later: bool = True,
    known: OrderBytes | None = None,
) -> IntervalTables:
    """The tables for all stages between ``cuts`` (positions in ``order``).

    The last stage computes the loss. ``later``: stages have further backwards after the first one, as they do
    with several micro-batches. ``known`` has the bytes along this order, if they have been computed before.
    """
    width = len(order) + 1
    build = _Builder(width, cuts)
    place = positions_of(order) if known is None else known.place
    regions = None
    if costs.keys:
        regions = RegionLiveness(costs, place, build.starts, width)
    along = known or find_order_bytes(costs, place, regions)
    retained, crossing, state = along.retained, along.crossing, along.state
    saved = build.at_ends(retained.saved)
    backward = build.everywhere(retained.backward)
    gone, freed = Rectangles(), list[IntervalCorrection]()
    for each in (each for value in crossing.copies for each in releases(value, build.starts)):
        if each.sender == NEVER:  # whatever the stage's end
            gone.add(each.first, each.last, each.begin, each.nbytes)
        else:
            freed.append(each)
    forward = build.everywhere(retained.forward.with_more(gone))
    live = backward + along.backward_transient
    if regions is not None:
        live += regions.table("backward")
        incoming = by_position(place, [c.backward_incoming for c in costs.nodes])
        again = regions.peak_while_recomputing(backward, incoming, along.forward_transient)
        live = np.maximum(live, again)
        saved = saved + build.pick_ends(regions.table("saved"))
        forward = forward + regions.table("forward")
    used, stays = build.everywhere(state.trained), build.everywhere(state.kept_gradients)
    casts = build.everywhere(state.casts)
    growing, grown = _backward_live(build, live, retained.pending, used, stays, casts, later=later)
    if grown is not None and casts.any():
        # At the end, these gradients become fp32 one by one.
        whole = by_position(place, [2 * cost.cast_nbytes for cost in costs.nodes])
        largest = build.running_max(np.broadcast_to(whole, live.shape))
        grown = np.maximum(grown, build.pick_ends(used + casts) + largest)
    growing += build.at_ends(state.sent_home)
    growing[:, -1] += LOSS_NBYTES
    if grown is not None:
        grown[:, -1] += LOSS_NBYTES
    received = build.at_ends(crossing.received)
    most_forward = build.running_max(forward + along.forward_transient, corrections=freed)
    return IntervalTables(
        cuts=tuple(cuts),
        state=StageState(
            parameters=build.at_ends(state.parameters) + build.pick_ends(casts),
            buffers=build.at_ends(state.buffers),
            trained=build.pick_ends(used),
            owned=build.at_ends(state.owned),
            kept_gradients=build.pick_ends(stays),
            being_divided=_being_divided(costs, build.pick_ends(used)),
            updating=build.running_max(_updating(state.trained_at, build)),
        ),
        saved=saved,
        saved_fixed=build.at_ends(retained.saved_fixed),
        received=received,
        computed=build.at_ends(crossing.computed),
        sent=build.at_ends(crossing.sent),
        forward_live=most_forward + received,
        backward_live_growing=growing,
        backward_live_grown=grown,
        work=costs.work,
        nodes=np.argsort(place),
        hosted=by_position(place, [c.host_nbytes for c in costs.nodes]),
        results=build.at_ends(crossing.results),
        waiting=by_position(place, costs.waiting_nbytes),
    )


def _backward_live(
    build: _Builder,
    live: Table,
    corrections: Sequence[IntervalCorrection],
    used: Table,
    stays: Table,
    casts: Table,
    *,
    later: bool,
) -> tuple[Table, Table | None]:
    """The most bytes in the first backward, including gradients, and in a later one.

    ``used`` has the bytes of all parameters' gradients up to each position, ``stays`` those that stay here,
    ``casts`` those of the weights' copies in half precision.
    """
    # gradients(i, b) are the gradients of the stage's trained parameters that are not used in [a, i].
    trained = build.pick_ends(used)
    growing = build.running_max(live - used, corrections=corrections) + trained
    if not later:
        return growing, None
    # In a later backward, all gradients that stay here exist. Those of copied parameters have been sent to
    # the owning stage, and accumulate anew.
    # Gradients of casts wait for the end: autograd runs first what was recorded last, and the casts were
    # recorded with the first micro-batch.
    grown = build.running_max(live - (used - stays) - casts, corrections=corrections)
    return growing, grown + trained + build.pick_ends(casts)


def _being_divided(costs: CostTable, pieces: Table) -> Table:
    """The most bytes of whole gradients beside ``pieces`` of all: those of two buckets."""
    trained = [tensor for tensor in costs.state if tensor.trained]
    ranks = max((tensor.gradient_ranks for tensor in trained), default=1)
    largest = max([BUCKET_NBYTES, *(tensor.nbytes for tensor in trained)])
    return np.minimum((ranks - 1) * pieces, BUCKET_NBYTES + largest)


def _updating(trained_at: Iterable[tuple[int, int]], build: _Builder) -> Table:
    """For each start and position, the temporary bytes of Adam's loop for a parameter first used there.

    They are a square root and a quotient. The quotient of the previous parameter is freed only after both
    have been computed.
    """
    table = np.zeros((len(build.starts), build.width))
    before: tuple[int, int] | None = None  # position and bytes of the previous parameter
    for at, nbytes in trained_at:
        found = [(at, at, 2 * nbytes)]
        if before is not None:
            found.append((min(at, before[0]), max(at, before[0]), 2 * nbytes + before[1]))
        for last_start, column, most in found:
            rows = table[: build.rows_up_to(last_start), column]
            np.maximum(rows, most, out=rows)
        before = at, nbytes
    return table


class _Builder:
    """Builds tables with a row for each start of a stage and a column for each position or end."""

    def __init__(self, width: int, cuts: Sequence[int]) -> None:
        self.width = width
        self.starts = list(cuts[:-1])
        self.ends = [*cuts[1:-1], width]  # the last stage computes the loss too
        self._rows_before = np.searchsorted(self.starts, np.arange(width + 1))
        self._end_of = np.searchsorted(self.ends, np.arange(width + 1), side="right")
        self._positions = np.arange(width + 1)
        self._valid = np.asarray(self.ends)[None, :] > np.asarray(self.starts)[:, None]

    def rows_up_to(self, position: int) -> int:
        """The number of starts at or before this position."""
        return int(self._rows_before[position + 1])

    def everywhere(self, rectangles: Rectangles) -> Table:
        """The sum of ``rectangles``, with a column for each position."""
        return self._sum(rectangles, self._positions)

    def at_ends(self, rectangles: Rectangles) -> Table:
        """The sum of ``rectangles`` at the last position of each stage, with a column for each end."""
        # A position counts from the column of the first end after it.
        return np.where(self._valid, self._sum(rectangles, self._end_of), 0.0)

    def _sum(self, rectangles: Rectangles, column_of: NDArray[np.int64]) -> Table:
        sums = rectangles.steps(self._rows_before, column_of)
        for before, row in pairwise(sums):  # takes half the time of np.cumsum along this axis
            row += before
        return np.cumsum(sums, axis=1, out=sums)[:-1, :-1]

    def pick_ends(self, table: Table) -> Table:
        """``table`` at the last position of each stage, with a column for each end; 0 if end <= start."""
        return np.where(self._valid, table[:, np.asarray(self.ends) - 1], 0.0)

    def running_max(self, table: Table, *, corrections: Sequence[IntervalCorrection] = ()) -> Table:
        """For each start and end, the largest value in columns start … end - 1."""
        return np.where(self._valid, largest_up_to(table, self.starts, self.ends, corrections), 0.0)
