"""Estimates what a stage costs: its peak memory, its seconds, and the bytes that cross its boundaries.

A stage is an interval ``[a, b)`` of positions in a topological order of the nodes. Backward runs in
reverse order. While the backward of node ``i`` runs, the live bytes of one micro-batch are

    saved(a, i)      storages that the backward of some node in [a, i] still needs
  + pending(a, i)    activation gradients that have been computed here but not used yet
  + transient(i)     bytes that are alive only while the backward of i runs
  + gradients(i, b)  gradients of parameters whose backward has ended

Let ``c`` micro-batches be in flight at the stage during its first backward, and ``c'`` during later ones (a
smaller last micro-batch counts by its share of the rows). Then the peak of the step is

    parameters + buffers + optimizer
      + max( (c - 1) * saved(a, b) + max_i live(i),    first backward: gradients accumulate
             (c'- 1) * saved(a, b) + max_i live(i),    later ones: with all gradients
             (c - 1) * saved(a, b) + forward(a, b),
             (c'- 1) * saved(a, b) + forward(a, b) + gradients,    under 1F1B
             gradients + the optimizer's own transient (`OptimizerMemory`) )

and under a schedule with split backwards the gradients of the most micro-batches whose second half waits.
If ranks keep pieces of gradients, those that are whole still come in addition.

`placer.partition.stage_cost.tables` has every term for all stages of an order, so each peak takes O(1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from placer.cost import CostTable
from placer.machine.catalogue import DeviceKind
from placer.partition.rectangles import Table
from placer.partition.stage_cost.optimizer import OptimizerMemory
from placer.partition.stage_cost.order_bytes import LOSS_NBYTES
from placer.partition.stage_cost.tables import IntervalTables
from placer.schedule import Counts, InFlight


def peak_bytes(
    tables: IntervalTables,
    in_flight: InFlight,
    optimizer: OptimizerMemory,
    *,
    training: bool,
    received_from: Sequence[float] | None = None,
) -> Table:
    """Peak bytes of every interval over a step, at a pipeline position with ``in_flight`` micro-batches.

    ``received_from`` has the bytes that the stage reads from the first, second, … stage. If it is None, all
    values are assumed to come from the stage with the most pending gradients, which gives an upper bound.
    """
    static = tables.state.kept(optimizer)
    if not training:
        # The results of all micro-batches are kept, and joined at the end.
        before, last = in_flight.microbatches - 1, in_flight.last_share
        running = before * tables.results + last * tables.forward_live
        if before:
            running = np.maximum(running, (before - 1) * tables.results + tables.forward_live)
            running = np.maximum(running, 2 * (before + last) * tables.results)
        return static + running
    pending = partial(_pending_gradients, tables, received_from)
    peak = saved_bytes(tables, in_flight.first_backward) + tables.backward_live_growing
    peak = peak + pending(in_flight.pending_at_backwards)
    for others, share in in_flight.forwards:
        peak = np.maximum(peak, saved_bytes(tables, others) + _running(tables, share))
    if in_flight.microbatches > 1:
        # Losses of finished micro-batches are kept. The largest peaks are before a smaller last one.
        begun = in_flight.microbatches - (in_flight.last_share < 1)

        def saved_beside(others: float, share: float) -> Table:
            saved = saved_bytes(tables, others)
            saved[:, -1] += LOSS_NBYTES * (begun - max(1, int(others + share)))
            return saved

        for others, share in in_flight.later_backwards:
            assert tables.backward_live_grown is not None, "these tables are for one micro-batch"
            grown = tables.backward_live_grown - tables.state.trained
            backward = tables.state.trained + _of_share(grown, tables, share)
            backward = backward + pending(in_flight.pending_at_backwards)
            peak = np.maximum(peak, saved_beside(others, share) + backward)
        for others, share in in_flight.later_forwards:
            forward = (
                tables.state.kept_gradients
                + _running(tables, share)
                + pending(in_flight.pending_at_forwards)
            )
            peak = np.maximum(peak, saved_beside(others, share) + forward)
    peak = peak + tables.state.being_divided
    if in_flight.waiting:
        peak = peak + in_flight.waiting * _intervals(tables, tables.waiting)
    return np.maximum(static + peak, tables.state.while_updating(optimizer))


def saved_bytes(tables: IntervalTables, count: float) -> Table:
    """Bytes that ``count`` micro-batches keep from forward to backward; a fraction is a smaller one."""
    return count * tables.saved + (math.ceil(count) - count) * tables.saved_fixed


def _running(tables: IntervalTables, share: float) -> Table:
    """Bytes during the forward of a micro-batch with this share of the rows."""
    return _of_share(tables.forward_live, tables, share)


def _of_share(live: Table, tables: IntervalTables, share: float) -> Table:
    if share == 1:
        return live
    fixed = np.minimum(tables.saved_fixed, live)
    return fixed + share * (live - fixed)


def _pending_gradients(
    tables: IntervalTables, received_from: Sequence[float] | None, counts: Counts
) -> Table | float:
    """The most bytes, at any moment, of gradients for earlier stages that those stages have not used yet."""
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
    """Peak bytes of every interval, like `peak_bytes`, in a replica other than the first.

    Such a replica has no optimizer state. Its gradients are sent to the first replica after each backward:
    autograd does so last, because the parameters were copied before the stages ran. Until then, the replica
    keeps the parameter gradients of the micro-batch.
    """
    static = tables.state.kept(None)
    if not training:
        return static + tables.forward_live
    pending = partial(_pending_gradients, tables, received_from)
    forward = tables.forward_live + pending(in_flight.pending_at_forwards)
    backward = tables.backward_live_growing + pending(in_flight.pending_at_backwards)
    others = saved_bytes(tables, in_flight.most) - tables.saved
    return static + others + np.maximum(forward, backward)


def stage_seconds(
    tables: IntervalTables, kind: DeviceKind, *, own_host: bool = False, overlapped: bool = False
) -> tuple[Table, Table]:
    """Forward and backward seconds of every interval on a device, without transfers between stages.

    Offloaded values are copied to the host in forward and back in backward. Copies add to the seconds of
    computation; if they are ``overlapped`` with it, a pass takes at least as long as its copies. With
    ``own_host``, each stage has its own process and takes at least as long as that process needs to launch
    the operations. Otherwise one process launches the operations of all stages, which takes the same time
    wherever stages end.
    """
    moved = tables.hosted / kind.host_bandwidth
    seconds = tables.work.seconds(kind)
    computed = [part.device[tables.nodes] for part in (seconds.forward, seconds.backward)]
    if overlapped:
        copied = _intervals(tables, moved)
        forward, backward = (np.maximum(_intervals(tables, part), copied) for part in computed)
    else:
        forward, backward = (_intervals(tables, part + moved) for part in computed)
    if own_host:
        launching = launch_seconds(tables, kind)
        return np.maximum(forward, launching[0]), np.maximum(backward, launching[1])
    return forward, backward


def launch_seconds(tables: IntervalTables, kind: DeviceKind) -> tuple[Table, Table]:
    """Seconds that a process takes to launch the operations of every interval, in forward and in backward."""
    seconds = tables.work.seconds(kind)
    return (
        _intervals(tables, seconds.forward.host[tables.nodes]),
        _intervals(tables, seconds.backward.host[tables.nodes]),
    )


def unit_seconds(
    costs: CostTable,
    kind: DeviceKind,
    *,
    training: bool,
    own_host: bool = False,
    overlapped: bool = False,
) -> Table:
    """Seconds of every node (the loss last) on a device: its forward and, in training, its backward.

    The sum over a stage is its `stage_seconds`. With ``own_host``, the sum is a lower bound, which is exact
    if all nodes are limited by the device or all by the host. ``overlapped`` copies are left out.
    """
    seconds = costs.work.seconds(kind)
    moved = np.array([c.host_nbytes for c in costs.nodes]) / kind.host_bandwidth
    if overlapped:
        moved = np.zeros_like(moved)
    total = np.zeros(len(costs.nodes))
    for part in (seconds.forward, seconds.backward) if training else (seconds.forward,):
        on_device = part.device + moved
        total += on_device if not own_host or on_device.sum() >= part.host.sum() else part.host
    return total


def transfer_seconds(tables: IntervalTables, kind: DeviceKind, *, training: bool) -> Table:
    """Seconds to receive and send the values and gradients that cross the boundaries of every interval."""
    return (tables.received + tables.sent) * (2 if training else 1) / kind.link_bandwidth


def _intervals(tables: IntervalTables, of_nodes: Table) -> Table:
    """The sum of ``of_nodes`` over the nodes of each interval."""
    ends = [*tables.cuts[1:-1], len(tables.hosted)]
    prefix = np.concatenate([[0.0], np.cumsum(of_nodes)])[[0, *ends]]
    found: Table = prefix[None, 1:] - prefix[:-1, None]
    return found
