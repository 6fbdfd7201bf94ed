"""The least seconds and bytes that a strategy can need, from sums over the model's operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from torch import Tensor

from placer.cost import CostEstimates, CostTable, Loss, batch_rows, with_fewer_rows
from placer.errors import CaptureError
from placer.grid import Grid, NodeLayout
from placer.machine.devices import device_type
from placer.machine.links import Links
from placer.partition import MANY_STAGES
from placer.partition.stage_cost.optimizer import optimizer_bytes, optimizer_seconds
from placer.partition.types import whole_backwards
from placer.planner.batch import microbatch_inputs
from placer.planner.devices import device_slot, likely_kernels, links_of
from placer.planner.resolve import node_layout_of
from placer.precision import keeps_casts
from placer.program import Program
from placer.schedule import splits_backward
from placer.search.candidates import free_fields
from placer.search.chain import Chain, Limits
from placer.search.strategy import Strategy
from placer.spec import PlacementSpec
from placer.state_layout import StateLayout, layout_of

# The share of a device's room that is for what estimates leave out: kernels' workspaces, activations that are
# alive for a moment, and memory that torch's allocator cannot use
SPARE = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No plan with a strategy takes fewer ``seconds``, or fewer ``nbytes`` on its fullest device.

    ``state`` is the part of the bytes that parameters, gradients and the optimizer's state take.
    ``worst_seconds`` are those on the same machine at its worst (`Links.at_worst`). An estimate is for
    ``node_layout``, a bound for any that may be chosen.
    """

    seconds: float
    worst_seconds: float
    nbytes: float
    state: float
    node_layout: NodeLayout = "stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Sums over all operations of a micro-batch, in seconds of the fastest device and in bytes.

    ``launches`` are the seconds of a process to launch the operations, in forward and in backward.
    """

    forward: float
    backward: float
    launches: tuple[float, float]
    longest: float  # the longest operation, forward and backward
    saved: float


class Bounds:
    """The `Bound` of strategies for one program and its inputs, on devices like the best of a pool.

    Costs of micro-batches are scaled from those of the whole batch, so the model runs once. This leaves out
    what is computed from weights alone; estimates get it from another run, of one row.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Tensor],
        wanted: PlacementSpec,
        costs: CostEstimates,
        loss: Loss,
        *,
        processes: bool,
    ) -> None:
        self._program, self._inputs, self._wanted = program, inputs, wanted
        self._estimates, self._loss, self._processes = costs, loss, processes
        self._slots = list(
            dict.fromkeys(replace(device_slot(d, wanted), name="") for d in wanted.devices)
        )
        links = links_of(wanted)
        self._links, self._at_worst = links, links.at_worst()
        self._serial = not processes and all(device_type(d.name) == "cpu" for d in wanted.devices)
        optimizer = wanted.optimizer
        self._optimizer = optimizer if isinstance(optimizer, str) else optimizer.model_dump()
        self._rows = batch_rows(program, inputs) or 1
        self._many = len(wanted.devices) > MANY_STAGES
        whole = self._run(self._rows, kept=self._many and self._keeps_casts)
        self._parameters = sum(t.nbytes for t in whole.state)
        self._trained = whole.trained_nbytes
        self._sums = functools.lru_cache(maxsize=None)(self._sum)
        self._chain = functools.lru_cache(maxsize=None)(self._make_chain)
        free = "node_layout" in free_fields(wanted) and processes and links.network is not None
        self._layouts = get_args(NodeLayout) if free else (node_layout_of(wanted),)
        # The most bytes that any device has for tensors
        self.room = max(float("inf") if slot.room is None else slot.room for slot in self._slots)

    def _run(self, rows: int, *, kept: bool) -> CostTable:
        """The costs of a micro-batch of so many rows."""
        return self._estimates(
            microbatch_inputs(self._program, self._inputs, rows),
            training=self._wanted.training,
            precision=self._wanted.precision,
            kernels=likely_kernels(self._wanted),
            loss=self._loss,
            keeps_casts=kept,
        )

    def _sums_of(self, strategy: Strategy) -> _Sums:
        own_weights = self._processes or strategy.replicas == 1
        precision, count = self._wanted.precision, strategy.microbatches
        kept = self._keeps_casts  # of many stages few micro-batches are no worse a bound
        if not self._many:
            kept = keeps_casts(precision, count, own_weights=own_weights)
        return self._sums(self.rows_of(strategy), kept=kept)

    def rows_of(self, strategy: Strategy) -> int:
        """The rows of its largest micro-batch."""
        of_replica = -(-self._rows // strategy.replicas)
        return -(-of_replica // strategy.microbatches)

    def _sum(self, rows: int, *, kept: bool) -> _Sums:
        """Of a micro-batch of so many rows, scaled from those of the whole batch."""
        whole, training = self._run(self._rows, kept=kept), self._wanted.training
        share = rows / self._rows
        work = whole.work.with_share(share)
        saved = [v for v in whole.values if v.savers and v.producer >= 0]
        found = []
        for kind in dict.fromkeys(slot.kind for slot in self._slots):
            seconds = work.seconds(kind)
            backward = seconds.backward.device * training
            found.append(
                _Sums(
                    forward=float(seconds.forward.device.sum()),
                    backward=float(backward.sum()),
                    launches=(
                        float(seconds.forward.host.sum()),
                        float(seconds.backward.host.sum()) * training,
                    ),
                    longest=float(np.max(seconds.forward.device + backward)),
                    saved=sum(v.nbytes * (1.0 if v.fixed else share) for v in saved),
                )
            )
        return min(found, key=lambda sums: sums.forward + sums.backward)

    def __call__(self, strategy: Strategy) -> Bound:
        """The bound of ``strategy``, whose replicas and micro-batches all have rows."""
        sums = self._sums_of(strategy)
        slowest = sums.longest / strategy.shards
        # Values are sent at once, so the layout in which sums take the least time is the best.
        grid = self._grid(strategy, self._layouts[-1])
        layout = self._layout(strategy)
        seconds, worst = self._seconds(strategy, grid, layout, sums, slowest)
        nbytes, state = self.nbytes(strategy)
        return Bound(seconds=seconds, worst_seconds=worst, nbytes=nbytes, state=state)

    def nbytes(self, strategy: Strategy) -> tuple[float, float]:
        """The bytes of the bound of ``strategy``, and those of state, which are a part of them."""
        layout = self._layout(strategy)
        optimizer = optimizer_bytes(self._optimizer).state / layout.optimizer
        trained = self._trained if self._wanted.training else 0.0
        gradients = trained / layout.gradients
        state = (self._parameters + gradients + optimizer * trained) / strategy.stages
        if not self._wanted.training or strategy.recompute or strategy.offload:
            return state, state
        # A stage with k micro-batches in flight holds at most 1/k of what another holds with one.
        room = _saved_room(self._schedule(strategy), strategy.stages, strategy.microbatches)
        saved = self._sums_of(strategy).saved / strategy.shards / room
        return state + max(0.0, saved - gradients / strategy.stages), state

    def along_program_order(self, strategy: Strategy, share: float = 1.0) -> Bound | None:
        """An estimate of the best stages along program order instead of a bound; None if none fit.

        It is for devices that are alike, and strategies without shards, chunks and offloading. Its ``nbytes``
        are the bound's. ``share`` is the part of the room that may be filled.
        """
        sums = self._sums_of(strategy)
        counts = self._schedule(strategy), strategy.stages, strategy.microbatches
        layout = self._layout(strategy)
        memory = optimizer_bytes(self._optimizer, together=True).divided(layout.optimizer)
        kept = 1 + 1 / layout.gradients + memory.state
        limits = Limits(
            in_flight=_in_flight(*counts),
            waiting=_waiting(*counts),
            room=self.room * share * (1 - SPARE),
            state=kept,
            updating=kept + memory.together,
            recomputes=strategy.recompute,
        )
        chain = self._chain(self.rows_of(strategy))
        backward = chain.both[-1] - chain.forward[-1]
        sums = replace(sums, forward=chain.forward[-1], backward=backward)
        slowest = chain.slowest_seconds(limits)
        if slowest is None:
            return None
        crossing, found = float(np.mean(chain.crossing)), []
        for node_layout in self._layouts:
            grid = self._grid(strategy, node_layout)
            hop = grid.rank(pp=1)
            sent = [
                self._links.send_seconds(crossing, rank, rank + hop)
                for rank in range(self._links.node)
            ]
            times = self._seconds(strategy, grid, layout, sums, slowest, float(np.mean(sent)))
            found.append((times, node_layout))
        (seconds, worst), best = min(found, key=lambda pair: pair[0])
        bound = self(strategy)
        return replace(bound, seconds=seconds, worst_seconds=worst, node_layout=best)

    def _grid(self, strategy: Strategy, layout: NodeLayout) -> Grid:
        return Grid(
            replicas=strategy.replicas,
            devices=strategy.stages,
            shards=strategy.shards,
            node_layout=layout,
        )

    @property
    def _keeps_casts(self) -> bool:
        """Whether many stages do, which have many micro-batches."""
        return keeps_casts(self._wanted.precision, 2, own_weights=True)

    def _make_chain(self, rows: int) -> Chain:
        """The chain for a micro-batch of so many rows, between those of one row and of all."""
        whole, one = self._chains
        share = (self._rows - rows) / max(self._rows - 1, 1)
        return whole.plus(one, share).plus(whole, -share)

    @functools.cached_property
    def _chains(self) -> tuple[Chain, Chain]:
        """The chains for all rows, and for one."""
        whole = self._run(self._rows, kept=self._keeps_casts)
        try:
            one = self._run(1, kept=self._keeps_casts)
        except CaptureError:  # a model that needs more rows, such as for BatchNorm
            one = with_fewer_rows(whole, 1 / self._rows)
        kind, training = self._slots[0].kind, self._wanted.training
        return Chain.of(whole, kind, training=training), Chain.of(one, kind, training=training)

    def _seconds(
        self,
        strategy: Strategy,
        grid: Grid,
        layout: StateLayout,
        sums: _Sums,
        slowest: float,
        sent: float = 0.0,
    ) -> tuple[float, float]:
        """Seconds of a step, and of one at worst.

        The slowest stage takes at least ``slowest`` for a micro-batch; a value gets to the next stage in
        ``sent``, or at once in a lower bound.
        """
        stages, count = strategy.stages, strategy.microbatches
        forward, backward = sums.forward / strategy.shards, sums.backward / strategy.shards
        own = self._trained / (1 if self._serial else stages) if self._wanted.training else 0.0
        ranks = layout.optimizer
        piece = own / ranks
        update = min(optimizer_seconds(piece, self._optimizer, slot.kind) for slot in self._slots)
        least = strategy.replicas * count * strategy.shards * sum(sums.launches)
        if self._processes:
            forward, backward = map(max, (forward, backward), sums.launches)
            least = 0.0
        slowest = max(slowest, (forward + backward) / stages)
        # The first stage starts at once, and the last one when a micro-batch has passed all others.
        others, split = (stages - 1) / stages, splits_backward(self._schedule(strategy))
        filling = others * (forward if split else forward + backward)
        work = count * slowest + filling + (stages - 1) * sent * (1 + self._wanted.training)
        if sent and self._wanted.training:
            # There is nothing to do in their place while values of further micro-batches are sent, but the
            # second halves of backwards; and few micro-batches have few of these.
            half = split * (slowest - forward / stages) / 2
            work += max(0, count - stages) * max(0.0, 2 * sent - half)
            alone = others * (forward + half * stages) + count * (slowest - half)
            work = max(work, alone + 2 * (stages - 1) * sent)
        if self._serial:
            work = least = strategy.replicas * count * strategy.shards * (forward + backward)
        found = []
        for links in (self._links, self._at_worst):
            exchanged = self._exchange(
                links, grid, own, slowest, backward / stages, layout.gradients, count
            )
            gathered = links.gather_seconds(own, ranks=ranks, stride=grid.stride)
            found.append(max(work + exchanged * (not self._serial), least) + update + gathered)
        return found[0], found[1]

    def _layout(self, strategy: Strategy) -> StateLayout:
        given, over = self._wanted.shard_state, self._wanted.shard_over
        return layout_of(
            strategy.shard_state if given == "auto" or strategy.shard_state != "none" else given,
            replicas=strategy.replicas,
            shards=strategy.shards,
            shard_over=None if over == "auto" else over,
        )

    def _exchange(
        self,
        links: Links,
        grid: Grid,
        own: float,
        slowest: float,
        backward: float,
        pieces: int,
        rounds: int,
    ) -> float:
        """Seconds of the sums of gradients that nothing hides."""
        ranks = grid.replicas * grid.shards
        if ranks == 1 or not own:
            return 0.0
        if not self._processes:  # the weights are copied to all others, one after the other
            return (ranks - 1) * links.send_seconds(own, 0, 1)
        summed = links.reduce_seconds(
            own, ranks=ranks, stride=grid.stride, pieces=pieces, rounds=rounds
        )
        if pieces == 1:
            return max(0.0, summed - backward)
        return (rounds - 1) * max(0.0, summed - slowest) + max(0.0, summed - backward)

    def _schedule(self, strategy: Strategy) -> str:
        """The schedule that its plan has: in one process, or recomputing, backwards are whole."""
        whole = strategy.recompute or not self._processes
        return whole_backwards(strategy.schedule) if whole else strategy.schedule


def _in_flight(schedule: str, stages: int, microbatches: int) -> list[int]:
    """The micro-batches that each stage has in flight: all, or with 1F1B as many as stages follow, and one.

    A zero-bubble schedule keeps as many at every stage as 1F1B at the first: from the forward to the
    backward's half for weights (Qi et al. 2023, ZB-H1).
    """
    if schedule == "GPipe":
        return [microbatches] * stages
    if splits_backward(schedule):
        return [min(microbatches, stages)] * stages
    return [min(microbatches, following) for following in range(stages, 0, -1)]


def _waiting(schedule: str, stages: int, microbatches: int) -> list[int]:
    """The micro-batches between the halves of their backward at each stage, at most."""
    if not splits_backward(schedule):
        return [0] * stages
    return [min(microbatches, index + 1) for index in range(stages)]


@functools.cache
def _saved_room(schedule: str, stages: int, microbatches: int) -> float:
    """The sum over stages of 1 / (micro-batches in flight), which `_in_flight` counts."""
    few = min(microbatches, stages)
    if schedule == "GPipe" or splits_backward(schedule):
        return stages / (microbatches if schedule == "GPipe" else few)
    return sum(1 / count for count in range(1, few + 1)) + (stages - few) / microbatches
