"""The least seconds and bytes that a strategy can need, from sums over the model's operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from placer.cost import CostTable, Estimate, Loss
from placer.machine.devices import device_type
from placer.partition import MANY_STAGES
from placer.partition.stage_cost.optimizer import optimizer_bytes, optimizer_seconds
from placer.planner.devices import device_slot, likely_kernels, links_of
from placer.planner.resolve import microbatch_inputs
from placer.program import Program
from placer.search.strategy import Strategy
from placer.spec import PlacementSpec
from placer.state_layout import StateLayout, layout_of

_PRECISION = 1e-3  # relative, of the slowest stage's share


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No plan with a strategy takes fewer ``seconds``, or fewer ``nbytes`` on its fullest device.

    For more than `MANY_STAGES` stages the seconds are those along program order, as plans of them are.
    ``state`` is the part of the bytes that parameters, gradients and the optimizer's state take.
    """

    seconds: float
    nbytes: float
    state: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Sums over all operations of a micro-batch, in seconds of the fastest device and in bytes."""

    forward: float
    backward: float
    launch: float
    longest: float  # the longest operation, forward and backward
    saved: float


class Bounds:
    """The `Bound` of strategies for one program and its inputs, on devices like the best of a pool.

    Costs of micro-batches are scaled from those of the whole batch, so the model runs once.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Tensor],
        wanted: PlacementSpec,
        estimate: Estimate,
        loss: Loss,
        *,
        processes: bool,
    ) -> None:
        self._program, self._inputs, self._wanted = program, inputs, wanted
        self._estimate, self._loss, self._processes = estimate, loss, processes
        self._slots = list(
            dict.fromkeys(replace(device_slot(d, wanted), name="") for d in wanted.devices)
        )
        self._links = links_of(wanted)
        self._serial = not processes and all(device_type(d.name) == "cpu" for d in wanted.devices)
        optimizer = wanted.optimizer
        self._optimizer = optimizer if isinstance(optimizer, str) else optimizer.model_dump()
        costs = self._costs(1, 1)
        self._parameters = sum(t.nbytes for t in costs.state)
        self._trained = costs.trained_nbytes
        self._sums = functools.lru_cache(maxsize=None)(self._sum)
        self._largest_share = functools.lru_cache(maxsize=None)(self._find_largest_share)

    @property
    def room(self) -> float:
        """The most bytes that any device has for tensors; infinite without a budget."""
        return max(float("inf") if slot.room is None else slot.room for slot in self._slots)

    def _costs(self, replicas: int, microbatches: int) -> CostTable:
        return self._estimate(
            microbatch_inputs(self._program, self._inputs, replicas, microbatches),
            training=self._wanted.training,
            precision=self._wanted.precision,
            kernels=likely_kernels(self._wanted),
            loss=self._loss,
        )

    def _sum(self, replicas: int, microbatches: int) -> _Sums:
        costs, training = self._costs(replicas, microbatches), self._wanted.training
        found = []
        for kind in dict.fromkeys(slot.kind for slot in self._slots):
            seconds = costs.work.seconds(kind)
            backward = seconds.backward.device * training
            found.append(
                _Sums(
                    forward=float(seconds.forward.device.sum()),
                    backward=float(backward.sum()),
                    launch=float(
                        seconds.forward.host.sum() + training * seconds.backward.host.sum()
                    ),
                    longest=float(np.max(seconds.forward.device + backward)),
                    saved=float(
                        sum(v.nbytes for v in costs.values if v.savers and v.producer >= 0)
                    ),
                )
            )
        return min(found, key=lambda sums: sums.forward + sums.backward)

    def __call__(self, strategy: Strategy) -> Bound:
        """The bound of ``strategy``, whose replicas and micro-batches all have rows."""
        sums = self._sums(strategy.replicas, strategy.microbatches)
        return Bound(
            seconds=self._seconds(strategy, sums),
            nbytes=self._nbytes(strategy, sums),
            state=self._state(strategy),
        )

    def _seconds(self, strategy: Strategy, sums: _Sums) -> float:
        stages, count = strategy.stages, strategy.microbatches
        forward, backward = sums.forward / strategy.shards, sums.backward / strategy.shards
        own = self._trained / (1 if self._serial else stages) if self._wanted.training else 0.0
        exchanged = self._exchange(strategy, own, backward / stages)
        if self._serial:
            work = strategy.replicas * count * strategy.shards * (forward + backward)
        else:
            even = 1 / stages
            if stages > MANY_STAGES:
                even = self._largest_share(stages)
                backward += forward * strategy.recompute  # they recompute all that they can
            slot = max((forward + backward) * even, sums.longest / strategy.shards)
            launch = strategy.shards * sums.launch
            if self._processes:
                slot, launch = max(slot, sums.launch / stages), 0.0
            # The first stage starts at once, and the last one when a micro-batch has passed all others.
            filling = forward if strategy.schedule.endswith("ZeroBubble") else forward + backward
            work = max(
                count * slot + (stages - 1) / stages * filling + exchanged,
                strategy.replicas * count * launch,
            )
        piece = own / self._layout(strategy).optimizer
        update = min(optimizer_seconds(piece, self._optimizer, slot.kind) for slot in self._slots)
        return work + update

    def _find_largest_share(self, stages: int) -> float:
        """The least share of all time that the slowest of ``stages`` along program order can have.

        By bisection; a greedy pass tells whether no stage needs more than a limit.
        """
        seconds = self._costs(1, 1).work.seconds(self._slots[0].kind)
        ends = np.cumsum(seconds.forward.device + seconds.backward.device * self._wanted.training)
        low, high = 1 / stages, 1.0
        while high - low > _PRECISION * low:
            limit, start, used = (low + high) / 2, 0.0, 0
            while start < ends[-1] and used < stages:
                end = ends[np.searchsorted(ends, start + limit * ends[-1], side="right") - 1]
                if end <= start:
                    break
                start, used = float(end), used + 1
            low, high = (low, limit) if start >= ends[-1] else (limit, high)
        return low

    def _layout(self, strategy: Strategy) -> StateLayout:
        chosen = "optimizer" if strategy.shard_state else self._wanted.shard_state
        return layout_of(chosen, strategy.replicas * strategy.shards)

    def _exchange(self, strategy: Strategy, own: float, backward: float) -> float:
        """Seconds of the sums of gradients that nothing hides."""
        ranks = strategy.replicas * strategy.shards
        if ranks == 1 or not own:
            return 0.0
        if not self._processes:  # the weights are copied to all others, one after the other
            return (ranks - 1) * self._links.send_seconds(own, 0, 1)
        summed = self._links.all_reduce_seconds(own, ranks=ranks, stride=strategy.stages)
        return max(0.0, summed - backward)

    def _state(self, strategy: Strategy) -> float:
        """Bytes of weights, gradients and optimizer state that the fullest device holds at least."""
        optimizer = optimizer_bytes(self._optimizer).divided(self._layout(strategy).optimizer)
        trained = (1 + optimizer.state) * self._trained if self._wanted.training else 0.0
        return (self._parameters + trained) / strategy.stages

    def _nbytes(self, strategy: Strategy, sums: _Sums) -> float:
        if not self._wanted.training or strategy.recompute or strategy.offload:
            return self._state(strategy)
        # A stage with k micro-batches in flight holds at most 1/k of what another holds with one.
        room = _saved_room(strategy.schedule, strategy.stages, strategy.microbatches)
        activations = sums.saved / strategy.shards / room
        gradients = self._trained / strategy.stages
        return max(self._state(strategy), self._state(strategy) - gradients + activations)


@functools.cache
def _saved_room(schedule: str, stages: int, microbatches: int) -> float:
    """The sum over stages of 1 / (micro-batches in flight): with 1F1B as many as stages follow, and one.

    A zero-bubble schedule keeps as many (Qi et al. 2024, ZB-H1).
    """
    if schedule == "GPipe":
        return stages / microbatches
    return sum(1 / min(microbatches, following) for following in range(1, stages + 1))
