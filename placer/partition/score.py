"""The one formula for what a stage costs: peak bytes, seconds, crossing bytes.

A stage is an interval ``[a, b)`` of positions in one topological order of the nodes. With ``i`` the
node whose backward is running, and the order of backward the reverse of the order of forward, the
live bytes of one micro-batch are

    saved(a, i)      storages that the backward of some node in [a, i] still needs
  + waiting(a, i)    gradients that were made here and wait (`placer.partition.waiting`)
  + transient(i)     what only the backward of i needs, and makes
  + gradients(i, b)  of the parameters whose backward has ended

and the peak over the step, for ``c`` micro-batches in flight at the stage's position (a smaller last
one counts as its share of rows),

    parameters + buffers + optimizer
      + max( (c - 1) * saved(a, b) + max_i live(i),    first backward: gradients grow
             (c'- 1) * saved(a, b) + max_i live(i),    later ones: all gradients are there
             (c - 1) * saved(a, b) + forward(a, b),
             (c'- 1) * saved(a, b) + forward(a, b) + gradients,    under 1F1B
             gradients + the optimizer's own transient (`OptimizerBytes`) )

Every table is built from rectangles: "some user of v lies in [a, i]" holds exactly for a in
(previous user, user] and i >= user, so one two-dimensional prefix sum gives it for all intervals.
Building takes O(C * n + users) time and memory for C cuts and n nodes; each query is O(1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable, DeviceKind
from placer.partition.held import HeldInRegions
from placer.partition.received import find_needs, releases, smaller_copies
from placer.partition.waiting import Elsewhere, largest_up_to, waiting_gradients
from placer.schedule import Counts, InFlight

Table = NDArray[np.float64]

LOSS_NBYTES = 4  # a number of float32; the caller has it while backward runs


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """Bytes per byte of parameter: ``state`` stays, the others are there while parameters change.

    ``each``: of `IntervalTables.updating`, where one parameter is updated after the other;
    ``together``: of all that the device trains, where they are updated at once.
    """

    state: float
    each: float = 0.0
    together: float = 0.0


_STATE = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}  # as torch.optim keeps it


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTables:
    """All intervals of one order at once; ``[x, y]`` is the stage from cut x up to cut y, in bytes."""

    cuts: tuple[int, ...]  # positions where a stage may begin or end; first 0, last n
    parameters: Table
    buffers: Table
    trained: Table  # parameters with a gradient here
    owned: Table  # of those, the ones whose gradient and optimizer state stay here
    saved: Table
    saved_fixed: Table  # of that, what does not depend on the rows of a micro-batch
    received: Table  # values that come from other stages (or the caller)
    computed: Table  # of those, what other stages computed
    sent: Table
    forward_live: Table
    backward_live_growing: Table  # with gradients, in the first backward
    backward_live_grown: Table  # the same in a later one
    updating: Table  # what Adam's loop over the parameters makes
    flops: tuple[Table, Table]  # forward, backward; of every node along the order, the loss last
    traffic: tuple[Table, Table]
    hosted: Table  # bytes that wait on the host, of every node along the order
    results: Table  # what the stage gives to the caller


def build_tables(
    costs: CostTable, order: Sequence[int], cuts: Sequence[int], *, relayed: bool = False
) -> IntervalTables:
    """The tables for the stages that ``cuts`` of ``order`` (positions of nodes) allow.

    The loss is computed with the last node of the order. ``relayed``: values pass through every
    stage between their producer and their last reader; else they go there directly.
    """
    n = len(order)
    place = np.empty(n + 1, dtype=np.int64)  # node -> position; the loss stays last
    place[np.asarray(order, dtype=np.int64)] = np.arange(n)
    place[n] = n
    at = lambda nodes: sorted({int(place[i]) for i in nodes})  # noqa: E731
    build = _Builder(n + 1, cuts)

    saved, saved_fixed, waiting = build.rectangles(), build.rectangles(), build.rectangles()
    forward, received, sent = build.rectangles(), build.rectangles(), build.rectangles()
    computed = build.rectangles()
    released: list[Elsewhere] = []
    regions = None
    if costs.keys:
        regions = HeldInRegions(costs, place, build.starts, build.ends, n + 1)
    for number, v in enumerate(costs.values):
        if regions is not None and regions.take(number):
            continue
        savers, users = at(v.savers), at(v.users)
        producer = int(place[v.producer]) if v.producer >= 0 else -1
        saved.some(savers, v.nbytes)
        if v.fixed:
            saved_fixed.some(savers, v.nbytes)
        if len(savers) == 1:
            waiting.add(0, savers[0], savers[0] + 1, v.nbytes)
        else:
            waiting.some(savers, v.nbytes)
        if producer >= 0:
            last = n + 1 if savers else max(users, default=producer) + 1
            forward.add(0, producer, producer + 1, v.nbytes, until=last)
    for start, first_saver, nbytes in smaller_copies(costs, place, build.starts):
        saved.add(start, start, first_saver, -nbytes)
        waiting.add(start, start, first_saver, -nbytes)
    elsewhere = waiting_gradients(
        costs,
        place,
        lambda x, y, i, j, nbytes: waiting.add(x, y, i, nbytes, until=j),
        relayed=relayed,
        held_from=None if regions is None else regions.held_from,
    )
    needs = find_needs(costs, place)
    crossing = [
        *(
            (int(place[i]), at(r), costs.nodes[i].output_nbytes, needs.nodes[i])
            for i, r in enumerate(costs.readers)
        ),
        *(
            (-1, at(r), b, need)
            for r, b, need in zip(
                costs.input_readers, costs.input_nbytes, needs.inputs, strict=True
            )
        ),
    ]
    for producer, readers, nbytes, need in crossing:
        if relayed and producer >= 0 and readers and readers[-1] > producer:
            received.add(producer + 1, readers[-1], 0, nbytes)
            sent.add(0, readers[-1], producer, nbytes, until=readers[-1])
            continue
        received.some(readers, nbytes, after=producer)
        if readers:
            released += releases(producer, readers, need, nbytes)
        if producer >= 0:
            computed.some(readers, nbytes, after=producer)
        if producer >= 0 and readers and readers[-1] > producer:
            sent.add(0, producer, producer, nbytes, until=readers[-1])

    returned = sum(b for _, readers, b, _ in crossing if readers and readers[-1] == n)
    results = build.rectangles()
    results.add(0, n, n, returned)
    parameters, buffers = build.rectangles(), build.rectangles()
    trained, owned, sent_home = build.rectangles(), build.rectangles(), build.rectangles()
    uses_of = _uses(costs, costs.parameters_of, place)
    for name, uses in uses_of.items():
        nbytes = costs.state_nbytes[name]
        parameters.some(uses, nbytes)
        if name in costs.trained:
            trained.some(uses, nbytes)
            owned.add(0, uses[0], uses[0], nbytes)
            # A later stage's copy sends its gradient home before this stage's backward.
            sent_home.add(0, uses[0], uses[0], nbytes, until=uses[-1])
    for name, uses in _uses(costs, costs.buffers_of, place).items():
        buffers.some(uses, costs.state_nbytes[name])
    used = {costs.alias_of[x] for group in (*costs.parameters_of, *costs.buffers_of) for x in group}
    for name, nbytes in costs.state_nbytes.items():
        if name not in used:  # nobody reads it: it lives with the first stage
            (buffers if name not in costs.trained else parameters).add(0, 0, 0, nbytes)

    forwards, backwards = zip(*(node_transients(costs, i) for i in range(n + 1)), strict=True)
    forward_transient = _by_position(place, forwards)
    backward_transient = _by_position(place, backwards)
    # The loss stays in all of its stage's backward: added below where stages end with it, here off
    # where it is counted already.
    waiting.add(0, n, n, -LOSS_NBYTES)
    held, saved_table, forward_table = waiting.table(), saved.table(), forward.table()
    live = held + backward_transient
    if regions is not None:
        live += regions.table("waiting")
        incoming = _by_position(place, [c.backward_incoming for c in costs.nodes])
        live = np.maximum(live, regions.recomputing(held, incoming, forward_transient))
        elsewhere += regions.not_yet()
        saved_table = saved_table + regions.table("saved")
        forward_table = forward_table + regions.table("forward")
    # Gradients of (i, b): of what the stage trains, all that is not used in [a, i] as well.
    used_so_far = trained.table()
    trained_table = build.at_ends(used_so_far)
    growing = build.running_max(live - used_so_far, elsewhere=elsewhere) + trained_table
    growing = growing + build.at_ends(sent_home.table())
    # Gradients that stay are all there in a later backward; a mirror's went home and grow anew.
    owned_table = build.at_ends(owned.table())
    mirrored_so_far = used_so_far - owned.table()
    grown = build.running_max(live - mirrored_so_far, elsewhere=elsewhere) + trained_table
    for backward in (growing, grown):
        backward[:, -1] += LOSS_NBYTES
    along = lambda field: _by_position(place, [getattr(c, field) for c in costs.nodes])  # noqa: E731
    return IntervalTables(
        cuts=tuple(cuts),
        parameters=build.at_ends(parameters.table()),
        buffers=build.at_ends(buffers.table()),
        trained=trained_table,
        owned=owned_table,
        saved=build.at_ends(saved_table),
        saved_fixed=build.at_ends(saved_fixed.table()),
        received=build.at_ends(received.table()),
        computed=build.at_ends(computed.table()),
        sent=build.at_ends(sent.table()),
        forward_live=build.running_max(forward_table + forward_transient, elsewhere=released)
        + build.at_ends(received.table()),
        backward_live_growing=growing,
        backward_live_grown=grown,
        updating=build.running_max(_updating(costs, uses_of, build)),
        flops=(along("forward_flops"), along("backward_flops")),
        traffic=(along("forward_traffic"), along("backward_traffic")),
        hosted=along("host_nbytes"),
        results=build.at_ends(results.table()),
    )


def _uses(
    costs: CostTable, names_of: Iterable[tuple[str, ...]], place: NDArray[np.int64]
) -> dict[str, list[int]]:
    uses: dict[str, set[int]] = {}
    for node, names in enumerate(names_of):
        for name in names:
            uses.setdefault(costs.alias_of[name], set()).add(int(place[node]))
    return {name: sorted(positions) for name, positions in uses.items()}


def _updating(costs: CostTable, uses_of: Mapping[str, Sequence[int]], build: _Builder) -> Table:
    """Per start and position what Adam's loop makes for a parameter that is first used there.

    A square root and a quotient; the quotient of the parameter before it goes when they are made.
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
            rows = table[: np.searchsorted(build.starts, last_start, side="right"), column]
            np.maximum(rows, most, out=rows)
        before = at, nbytes
    return table


def node_transients(costs: CostTable, node: int) -> tuple[int, int]:
    """What the node needs on top while its forward runs, and its backward."""
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
        self.row_of = np.searchsorted(np.asarray(self.starts), np.arange(width), side="right")

    def rectangles(self) -> _Rectangles:
        return _Rectangles(self)

    def at_ends(self, table: Table) -> Table:
        """``[start, column]`` -> ``[start, cut where the stage ends]``; 0 where end <= start."""
        picked = table[:, np.asarray(self.ends) - 1]
        return np.where(self._valid(), picked, 0.0)

    def running_max(self, table: Table, *, elsewhere: Sequence[Elsewhere] = ()) -> Table:
        """The largest value of columns start … end - 1, per start and end."""
        return np.where(self._valid(), largest_up_to(table, self.starts, self.ends, elsewhere), 0.0)

    def _valid(self) -> NDArray[np.bool_]:
        return np.asarray(self.ends)[None, :] > np.asarray(self.starts)[:, None]


class _Rectangles:
    """A sum of constants over rectangles (starts x columns), as a difference array."""

    def __init__(self, builder: _Builder) -> None:
        self._builder = builder
        self._steps = np.zeros((len(builder.starts) + 1, builder.width + 1))

    def add(
        self, first: int, last: int, column: int, value: float, *, until: int | None = None
    ) -> None:
        """Add ``value`` for stages that start at positions first … last, in columns column … until - 1."""
        row_of, width = self._builder.row_of, self._builder.width
        top = int(row_of[first - 1]) if first > 0 else 0
        bottom = int(row_of[last]) if last >= 0 else 0
        until = width if until is None else min(until, width)
        if top >= bottom or column >= until:
            return
        self._steps[top, column] += value
        self._steps[bottom, column] -= value
        self._steps[top, until] -= value
        self._steps[bottom, until] += value

    def some(self, positions: Sequence[int], value: float, *, after: int = -1) -> None:
        """Add ``value`` where some of ``positions`` lies in [start, column] and ``after`` before start."""
        previous = after
        for position in positions:
            if position > previous:
                self.add(previous + 1, position, position, value)
                previous = position

    def table(self) -> Table:
        sums = np.cumsum(np.cumsum(self._steps, axis=0), axis=1)
        return sums[:-1, :-1]


def optimizer_bytes(
    optimizer: str | Mapping[str, int], *, together: bool = False
) -> OptimizerBytes:
    """What the optimizer that a spec names needs, per byte of (float32) parameter.

    ``together``: it updates all parameters of a device at once (``foreach``), as torch's optimizers
    do by default where all parameters are on CUDA devices. Adam's ``torch._foreach_sqrt`` then makes
    the square roots of all of them (torch/optim/adam.py of 2.15, ``_multi_tensor_adam``); SGD makes
    nothing either way. Of an optimizer that is given by its state nothing else is known.
    """
    if not isinstance(optimizer, str):
        return OptimizerBytes(state=optimizer["bytes_per_parameter"] / 4)
    if optimizer not in ("adam", "adamw"):
        return OptimizerBytes(state=_STATE[optimizer])
    return OptimizerBytes(state=_STATE[optimizer], each=1.0 - together, together=1.0 * together)


def peak_bytes(
    tables: IntervalTables,
    in_flight: InFlight,
    optimizer: OptimizerBytes,
    *,
    training: bool,
    received_from: Sequence[float] | None = None,
) -> Table:
    """Peak bytes of every interval over a step, at a position with ``in_flight`` micro-batches.

    ``received_from`` are the bytes of the values that it reads of the first, second, … stage; while
    these stages are not known, all are taken to come from where the most gradients wait for, an
    upper bound.
    """
    static = tables.parameters + tables.buffers + optimizer.state * tables.owned
    if not training:
        # Results of earlier micro-batches wait for those of the last, and are put together.
        before, last = in_flight.microbatches - 1, in_flight.last_share
        running = before * tables.results + last * tables.forward_live
        if before:
            running = np.maximum(running, (before - 1) * tables.results + tables.forward_live)
            running = np.maximum(running, 2 * (before + last) * tables.results)
        return static + running
    untaken = partial(_untaken_gradients, tables, received_from)
    peak = saved_bytes(tables, in_flight.first_backward) + tables.backward_live_growing
    peak = peak + untaken(in_flight.untaken_at_backwards)
    for others, share in in_flight.forwards:
        peak = np.maximum(peak, saved_bytes(tables, others) + _running(tables, share))
    if in_flight.microbatches > 1:
        # The losses of micro-batches that have ended stay; the largest ones are before a smaller last.
        begun = in_flight.microbatches - (in_flight.last_share < 1)

        def waiting(others: float, share: float) -> Table:
            saved = saved_bytes(tables, others)
            saved[:, -1] += LOSS_NBYTES * (begun - max(1, int(others + share)))
            return saved

        for others, share in in_flight.later_backwards:
            grown = tables.backward_live_grown - tables.trained
            backward = tables.trained + _of_share(grown, tables, share)
            backward = backward + untaken(in_flight.untaken_at_backwards)
            peak = np.maximum(peak, waiting(others, share) + backward)
        for others, share in in_flight.later_forwards:
            forward = (
                tables.owned + _running(tables, share) + untaken(in_flight.untaken_at_forwards)
            )
            peak = np.maximum(peak, waiting(others, share) + forward)
    step = (1 + optimizer.together) * tables.owned + optimizer.each * tables.updating
    return static + np.maximum(peak, step)


def saved_bytes(tables: IntervalTables, count: float) -> Table:
    """What ``count`` micro-batches hold from forward to backward; a fraction is a smaller last one."""
    return count * tables.saved + (math.ceil(count) - count) * tables.saved_fixed


def _running(tables: IntervalTables, share: float) -> Table:
    """What the forward of a micro-batch of this share of the rows has on the device."""
    return _of_share(tables.forward_live, tables, share)


def _of_share(live: Table, tables: IntervalTables, share: float) -> Table:
    if share == 1:
        return live
    fixed = np.minimum(tables.saved_fixed, live)
    return fixed + share * (live - fixed)


def _untaken_gradients(
    tables: IntervalTables, received_from: Sequence[float] | None, counts: Counts
) -> Table | float:
    """The most bytes of gradients that earlier stages have not taken yet, over all moments."""
    if not counts:
        return 0.0
    if received_from is None:
        return max(map(max, counts)) * tables.computed
    return float(max(np.dot(row, received_from) for row in counts))


def replica_peak_bytes(
    tables: IntervalTables,
    in_flight: InFlight,
    *,
    training: bool,
    received_from: Sequence[float] | None = None,
) -> Table:
    """The same on a further replica: no optimizer state, and gradients go home after each backward.

    Autograd runs the copies' way home last (they were made before the stages ran), so that a
    micro-batch's parameter gradients add up on the replica until its backward ends.
    """
    static = tables.parameters + tables.buffers
    if not training:
        return static + tables.forward_live
    untaken = partial(_untaken_gradients, tables, received_from)
    forward = tables.forward_live + untaken(in_flight.untaken_at_forwards)
    backward = tables.backward_live_growing + untaken(in_flight.untaken_at_backwards)
    others = saved_bytes(tables, in_flight.most) - tables.saved
    return static + others + np.maximum(forward, backward)


def stage_seconds(tables: IntervalTables, kind: DeviceKind, *, half: bool) -> tuple[Table, Table]:
    """Forward and backward seconds of every interval on a device, without transfers."""
    ends = [*tables.cuts[1:-1], len(tables.hosted)]
    found = []
    for flops, traffic in zip(tables.flops, tables.traffic, strict=True):
        seconds = node_seconds(flops, traffic, tables.hosted, kind, half=half)
        found.append(_between(np.concatenate([[0.0], np.cumsum(seconds)])[[0, *ends]]))
    return found[0], found[1]


def node_seconds(
    flops: Table, traffic: Table, hosted: Table, kind: DeviceKind, *, half: bool
) -> Table:
    """Seconds of every node on a device: the larger of its compute and its memory traffic.

    The roofline of S. Williams, A. Waterman and D. Patterson (CACM 2009), node by node. What waits
    on the host goes there in forward and comes back in backward, one after the rest.
    """
    peak = kind.half_flops if half else kind.fp32_flops
    seconds: Table = np.maximum(flops / peak, traffic / kind.memory_bandwidth)
    return seconds + hosted / kind.host_bandwidth


def unit_seconds(costs: CostTable, kind: DeviceKind, *, half: bool, training: bool) -> Table:
    """Seconds of every node (the loss last) on a device, forward and, in training, backward."""
    column = lambda field: np.array([getattr(c, field) for c in costs.nodes], dtype=np.float64)  # noqa: E731
    hosted = column("host_nbytes")
    seconds = np.zeros(len(costs.nodes))
    for way in ("forward", "backward") if training else ("forward",):
        flops, traffic = column(f"{way}_flops"), column(f"{way}_traffic")
        seconds += node_seconds(flops, traffic, hosted, kind, half=half)
    return seconds


def transfer_seconds(tables: IntervalTables, kind: DeviceKind, *, training: bool) -> Table:
    """Seconds to receive and send what crosses the borders of every interval, gradients included."""
    return (tables.received + tables.sent) * (2 if training else 1) / kind.link_bandwidth


def _between(prefix: Table) -> Table:
    return prefix[None, 1:] - prefix[:-1, None]
