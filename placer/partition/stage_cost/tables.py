"""Tables of bytes for all stages along one order at once: one entry per pair of cuts.

Tables are sums of rectangles: "some user of v lies in [a, i]" holds exactly for a in
(previous user, user] and i >= user, so one two-dimensional prefix sum gives it for all intervals.
Building takes O(C * n + users) time and memory for C cuts and n nodes; each query is O(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable, Work
from placer.partition.stage_cost.pending_gradients import (
    IntervalCorrection,
    largest_up_to,
    pending_gradients,
)
from placer.partition.stage_cost.received import find_needs, releases, smaller_copies
from placer.partition.stage_cost.region_liveness import RegionLiveness

Table = NDArray[np.float64]

LOSS_NBYTES = 4  # a float32; it is alive while backward runs


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTables:
    """Bytes of all stages along an order; ``[x, y]`` is the stage from cut x to cut y + 1."""

    cuts: tuple[int, ...]  # positions where a stage may begin or end; first 0, last n
    parameters: Table
    buffers: Table
    trained: Table  # parameters that have a gradient here
    owned: Table  # of those, the ones whose gradient and optimizer state are kept here
    saved: Table
    saved_fixed: Table  # of that, what does not depend on the rows of a micro-batch
    received: Table  # values from other stages, and inputs of the model
    computed: Table  # of those, the ones from other stages
    sent: Table
    forward_live: Table
    backward_live_growing: Table  # with gradients, in the first backward
    backward_live_grown: Table | None  # the same in a later backward; None if there is none
    updating: Table  # temporary tensors of Adam's loop over the parameters
    work: Work  # of every node, for its seconds
    nodes: NDArray[np.int64]  # along the order, the loss last
    hosted: Table  # offloaded bytes of every node along the order
    results: Table  # results of the model

    @property
    def nbytes(self) -> int:
        """Bytes of all tables that are as large as there are pairs of cuts."""
        return sum(
            t.nbytes for f in fields(self) if isinstance(t := getattr(self, f.name), np.ndarray)
        )


def build_tables(
    costs: CostTable,
    order: Sequence[int],
    cuts: Sequence[int],
    *,
    later: bool = True,
) -> IntervalTables:
    """The tables for the stages that ``cuts`` of ``order`` (positions of nodes) allow.

    The loss is computed with the last node of the order. ``later``: there are later backwards than a
    stage's first one, of further micro-batches.
    """
    n = len(order)
    place = np.empty(n + 1, dtype=np.int64)  # node -> position; the loss stays last
    place[np.asarray(order, dtype=np.int64)] = np.arange(n)
    place[n] = n
    build = _Builder(n + 1, cuts)
    regions = None
    if costs.keys:
        regions = RegionLiveness(costs, place, build.starts, build.ends, n + 1)
    held = _held_values(costs, place, build, regions)
    corrections = pending_gradients(
        costs,
        place,
        lambda x, y, i, j, nbytes: held.waiting.add(x, y, i, nbytes, until=j),
        held_from=None if regions is None else regions.held_from,
    )
    crossing = _crossing_values(costs, place, build)
    state = _state(costs, place, build)
    # The loss is alive in all of its stage's backward: it is added below for stages that end with it,
    # so it is taken off here where it is counted already.
    held.waiting.add(0, n, n, -LOSS_NBYTES)
    forwards, backwards = zip(*(node_transients(costs, i) for i in range(n + 1)), strict=True)
    forward_transient = _by_position(place, forwards)
    waiting, saved, forward = held.waiting.table(), held.saved.table(), held.forward.table()
    live = waiting + _by_position(place, backwards)
    if regions is not None:
        live += regions.table("waiting")
        incoming = _by_position(place, [c.backward_incoming for c in costs.nodes])
        live = np.maximum(live, regions.recomputing(waiting, incoming, forward_transient))
        corrections += regions.not_yet()
        saved = saved + build.pick_ends(regions.table("saved"))
        forward = forward + regions.table("forward")
    used, owned = state.trained.table(), state.owned.table()
    growing, grown = _backward_live(build, live, corrections, used, owned, later=later)
    growing += state.sent_home.table()
    growing[:, -1] += LOSS_NBYTES
    if grown is not None:
        grown[:, -1] += LOSS_NBYTES
    received = crossing.received.table()
    return IntervalTables(
        cuts=tuple(cuts),
        parameters=state.parameters.table(),
        buffers=state.buffers.table(),
        trained=build.pick_ends(used),
        owned=build.pick_ends(owned),
        saved=saved,
        saved_fixed=held.saved_fixed.table(),
        received=received,
        computed=crossing.computed.table(),
        sent=crossing.sent.table(),
        forward_live=build.running_max(forward + forward_transient, corrections=crossing.released)
        + received,
        backward_live_growing=growing,
        backward_live_grown=grown,
        updating=build.running_max(_updating(costs, state.uses_of, build)),
        work=costs.work,
        nodes=np.argsort(place),
        hosted=_by_position(place, [c.host_nbytes for c in costs.nodes]),
        results=crossing.results.table(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldValues:
    """Bytes of values that no region needs: from forward to backward, in backward, in forward."""

    saved: _Rectangles
    saved_fixed: _Rectangles
    waiting: _Rectangles
    forward: _Rectangles


def _held_values(
    costs: CostTable,
    place: NDArray[np.int64],
    build: _Builder,
    regions: RegionLiveness | None,
) -> _HeldValues:
    saved, saved_fixed = build.at_ends(), build.at_ends()
    waiting, forward = build.rectangles(), build.rectangles()
    for number, v in enumerate(costs.values):
        if regions is not None and regions.take(number):
            continue
        savers, users = _at(place, v.savers), _at(place, v.users)
        producer = int(place[v.producer]) if v.producer >= 0 else -1
        saved.some(savers, v.nbytes)
        if v.fixed:
            saved_fixed.some(savers, v.nbytes)
        if len(savers) == 1:
            waiting.add(0, savers[0], savers[0] + 1, v.nbytes)
        else:
            waiting.some(savers, v.nbytes)
        if producer >= 0:
            last = build.width if savers else max(users, default=producer) + 1
            forward.add(0, producer, producer + 1, v.nbytes, until=last)
    for start, first_saver, nbytes in smaller_copies(costs, place, build.starts):
        saved.add(start, start, first_saver, -nbytes)
        waiting.add(start, start, first_saver, -nbytes)
    return _HeldValues(saved=saved, saved_fixed=saved_fixed, waiting=waiting, forward=forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CrossingValues:
    """Values that cross the boundaries of stages; ``released``: copies that are freed before the end."""

    received: _Rectangles
    computed: _Rectangles
    sent: _Rectangles
    results: _Rectangles
    released: list[IntervalCorrection]


def _crossing_values(
    costs: CostTable, place: NDArray[np.int64], build: _Builder
) -> _CrossingValues:
    received, computed, sent = build.at_ends(), build.at_ends(), build.at_ends()
    released: list[IntervalCorrection] = []
    loss = build.width - 1
    needs = find_needs(costs, place)
    crossing = [
        *(
            (int(place[i]), _at(place, r), costs.nodes[i].output_nbytes, needs.nodes[i])
            for i, r in enumerate(costs.readers)
        ),
        *(
            (-1, _at(place, r), b, need)
            for r, b, need in zip(
                costs.input_readers, costs.input_nbytes, needs.inputs, strict=True
            )
        ),
    ]
    for producer, readers, nbytes, need in crossing:
        received.some(readers, nbytes, after=producer)
        if readers:
            released += releases(producer, readers, need, nbytes)
        if producer >= 0:
            computed.some(readers, nbytes, after=producer)
        if producer >= 0 and readers and readers[-1] > producer:
            sent.add(0, producer, producer, nbytes, until=readers[-1])

    returned = sum(b for _, readers, b, _ in crossing if readers and readers[-1] == loss)
    results = build.at_ends()
    results.add(0, loss, loss, returned)
    return _CrossingValues(
        received=received, computed=computed, sent=sent, results=results, released=released
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Parameters and buffers; ``sent_home``: gradients received from later stages' copies of parameters."""

    parameters: _Rectangles
    buffers: _Rectangles
    trained: _Rectangles
    owned: _Rectangles
    sent_home: _Rectangles
    uses_of: Mapping[str, Sequence[int]]  # parameter -> positions of the nodes that read it


def _state(costs: CostTable, place: NDArray[np.int64], build: _Builder) -> _State:
    parameters, buffers, sent_home = build.at_ends(), build.at_ends(), build.at_ends()
    trained, owned = build.rectangles(), build.rectangles()
    uses_of = _uses(costs, costs.parameters_of, place)
    for name, uses in uses_of.items():
        nbytes = costs.state_nbytes[name]
        parameters.some(uses, nbytes)
        if name in costs.trained:
            trained.some(uses, nbytes)
            owned.add(0, uses[0], uses[0], nbytes)
            # A later stage's copy sends its gradient before this stage's backward.
            sent_home.add(0, uses[0], uses[0], nbytes, until=uses[-1])
    for name, uses in _uses(costs, costs.buffers_of, place).items():
        buffers.some(uses, costs.state_nbytes[name])
    used = {costs.alias_of[x] for group in (*costs.parameters_of, *costs.buffers_of) for x in group}
    for name, nbytes in costs.state_nbytes.items():
        if name not in used:  # no node reads it: it is on the first stage
            (buffers if name not in costs.trained else parameters).add(0, 0, 0, nbytes)
    return _State(
        parameters=parameters,
        buffers=buffers,
        trained=trained,
        owned=owned,
        sent_home=sent_home,
        uses_of=uses_of,
    )


def _backward_live(
    build: _Builder,
    live: Table,
    corrections: Sequence[IntervalCorrection],
    used: Table,
    owned: Table,
    *,
    later: bool,
) -> tuple[Table, Table | None]:
    """The most bytes in the first backward, with gradients, and in a later one.

    ``used`` and ``owned`` are bytes of the parameters that are trained and, of those, kept here, up to
    each position.
    """
    # Gradients of (i, b): of the parameters that the stage trains, those that are not used in [a, i].
    trained = build.pick_ends(used)
    growing = build.running_max(live - used, corrections=corrections) + trained
    if not later:
        return growing, None
    # In a later backward all gradients that are kept here are there; those of copied parameters were
    # sent to their stage, and accumulate anew.
    grown = build.running_max(live - (used - owned), corrections=corrections) + trained
    return growing, grown


def _at(place: NDArray[np.int64], nodes: Iterable[int]) -> list[int]:
    """The positions of ``nodes``, each once, in order."""
    return sorted({int(place[i]) for i in nodes})


def _uses(
    costs: CostTable, names_of: Iterable[tuple[str, ...]], place: NDArray[np.int64]
) -> dict[str, list[int]]:
    uses: dict[str, set[int]] = {}
    for node, names in enumerate(names_of):
        for name in names:
            uses.setdefault(costs.alias_of[name], set()).add(int(place[node]))
    return {name: sorted(positions) for name, positions in uses.items()}


def _updating(costs: CostTable, uses_of: Mapping[str, Sequence[int]], build: _Builder) -> Table:
    """Per start and position the temporary bytes of Adam's loop for a parameter first used there.

    A square root and a quotient; the quotient of the parameter before is freed when they are computed.
    """
    table = np.zeros((len(build.starts), build.width))
    before: tuple[int, int] | None = None  # its position and bytes
    for name, nbytes in costs.state_nbytes.items():
        if name not in costs.trained or name not in uses_of:
            continue
        at = uses_of[name][0]
        found = [(at, at, 2 * nbytes)]
        if before is not None:
            found.append((min(at, before[0]), max(at, before[0]), 2 * nbytes + before[1]))
        for last_start, column, most in found:
            rows = table[: build.row_of[last_start], column]
            np.maximum(rows, most, out=rows)
        before = at, nbytes
    return table


def node_transients(costs: CostTable, node: int) -> tuple[int, int]:
    """Bytes that are alive only while the node's forward runs, and while its backward does."""
    key = costs.keys[node] if node < len(costs.keys) else None
    cost = costs.nodes[node]
    if key is not None and key.offload and not key.recompute:
        return cost.forward_sending, cost.backward_fetching
    return cost.forward_transient, cost.backward_transient


def _by_position(place: NDArray[np.int64], values: Sequence[float]) -> Table:
    table = np.zeros(len(values))
    table[place] = values
    return table


class _Builder:
    """Tables whose rows are the starts of stages and whose columns are positions of nodes."""

    def __init__(self, width: int, cuts: Sequence[int]) -> None:
        self.width = width
        self.starts = list(cuts[:-1])
        self.ends = [*cuts[1:-1], width]  # the last stage computes the loss too
        self.row_of = _ranks(self.starts, width)
        self._valid = np.asarray(self.ends)[None, :] > np.asarray(self.starts)[:, None]

    def rectangles(self) -> _Rectangles:
        """A column for each position."""
        return _Rectangles(self.row_of, list(range(self.width + 1)))

    def at_ends(self) -> _Rectangles:
        """A column for each end of a stage: that of the last position before it."""
        # Of a position, the first end after it is the first whose column has the position.
        return _Rectangles(self.row_of, _ranks(self.ends, self.width + 1), self._valid)

    def pick_ends(self, table: Table) -> Table:
        """``[start, column]`` -> ``[start, cut where the stage ends]``; 0 where end <= start."""
        return np.where(self._valid, table[:, np.asarray(self.ends) - 1], 0.0)

    def running_max(self, table: Table, *, corrections: Sequence[IntervalCorrection] = ()) -> Table:
        """The largest value of columns start … end - 1, per start and end."""
        return np.where(self._valid, largest_up_to(table, self.starts, self.ends, corrections), 0.0)


def _ranks(ascending: Sequence[int], count: int) -> list[int]:
    """For each of 0 … count - 1, how many of ``ascending`` are at most that."""
    found: list[int] = np.searchsorted(ascending, np.arange(count), side="right").tolist()
    return found


class _Rectangles:
    """A sum of constants over rectangles (starts x columns), as a difference array.

    ``row_of`` has per position how many starts are up to it, ``column_of`` the first column that has it;
    the last one of those is that of what lies after all columns. 0 where it is not ``valid``.
    """

    def __init__(
        self,
        row_of: Sequence[int],
        column_of: Sequence[int],
        valid: NDArray[np.bool_] | None = None,
    ) -> None:
        self._row_of, self._column_of, self._valid = row_of, column_of, valid
        self._steps = np.zeros((row_of[-1] + 1, column_of[-1] + 1))

    def add(
        self, first: int, last: int, column: int, value: float, *, until: int | None = None
    ) -> None:
        """Add ``value`` for stages that start at positions first … last, in columns column … until - 1."""
        row_of, column_of = self._row_of, self._column_of
        top = row_of[first - 1] if first > 0 else 0
        bottom = row_of[last] if last >= 0 else 0
        begin = column_of[column]
        end = column_of[-1] if until is None else column_of[min(until, len(column_of) - 1)]
        if top >= bottom or begin >= end:
            return
        steps = self._steps
        steps[top, begin] += value
        steps[bottom, begin] -= value
        steps[top, end] -= value
        steps[bottom, end] += value

    def some(self, positions: Sequence[int], value: float, *, after: int = -1) -> None:
        """Add ``value`` where some of ``positions`` lies in [start, column] and ``after`` before start."""
        previous = after
        for position in positions:
            if position > previous:
                self.add(previous + 1, position, position, value)
                previous = position

    def table(self) -> Table:
        sums = self._steps.copy()
        for before, row in pairwise(sums):  # half the time of a sum along this axis
            row += before
        found = np.cumsum(sums, axis=1)[:-1, :-1]
        return found if self._valid is None else np.where(self._valid, found, 0.0)
