"""Lays out the steps of many placements along one order in time, to find the shortest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from placer.cost import CostTable
from placer.machine.devices import device_type
from placer.partition.candidate import Candidate, copies_overlap, update_seconds
from placer.partition.chain import Mask, Table
from placer.partition.stage_cost.score import launch_seconds, stage_seconds
from placer.partition.types import DeviceSlot, PlanningOptions
from placer.plan.step_spans import lay_out_step
from placer.plan.types import NO_MEMORY, StagePlan, Transfer
from placer.timeline import end_of

_NEAR = 12  # places of a boundary on either side that are tried, and so many in all of its range
_MOST_CALLS, _MOST_ACTIONS = 300, 20_000  # of the clock, and laid out by it, for one placement
_LEAST_GAIN = 1e-6  # relative


def step_seconds(
    stages: Sequence[StagePlan],
    transfers: Sequence[Transfer],
    options: PlanningOptions,
    optimizer_seconds: float,
    *,
    replicas: int = 1,
) -> float:
    """The seconds of a step of ``stages``, laid out in time."""
    laid_out = 1 if options.processes else replicas  # with a process each, all take equally long
    spans = lay_out_step(
        stages,
        transfers,
        [[f"{s.devices[0]} of replica {replica}" for s in stages] for replica in range(laid_out)],
        schedule=options.schedule,
        microbatches=options.microbatches,
        training=options.training,
        processes=options.processes,
        optimizer_seconds=optimizer_seconds,
        shards=options.shards,
    )
    return end_of(spans)


class StepClock:
    """The seconds of a step for other cuts along the order of ``candidate``, on its devices.

    They are those of `describe_partition` for one replica (in one process, launches of the others come in
    addition, wherever the cuts are), but overlapping copies to the host are not laid out. A call takes time
    in proportion to the values of the model and to the actions of a step.
    """

    def __init__(self, candidate: Candidate, costs: CostTable, options: PlanningOptions) -> None:
        self._tables, self._slots, self._options = candidate.tables, candidate.slots, options
        self.microbatches = options.microbatches
        alike = {(slot.kind, device_type(slot.name)): slot for slot in candidate.slots}
        known = {key: self._of(slot) for key, slot in alike.items()}
        self._passes = [known[slot.kind, device_type(slot.name)] for slot in candidate.slots]
        place = np.argsort(candidate.tables.nodes)
        pairs = [
            (int(place[maker]), int(place[reader]), costs.nodes[maker].output_nbytes)
            for maker, readers in enumerate(costs.readers)
            for reader in readers
            if costs.nodes[maker].output_nbytes
        ]
        self._makers, self._readers, self._nbytes = np.array(pairs, dtype=np.int64).reshape(-1, 3).T

    def _of(self, slot: DeviceSlot) -> list[Table]:
        """Seconds of every interval on ``slot``: forward, backward, and to launch the two."""
        options, kind = self._options, slot.kind
        overlapped = copies_overlap(options, slot)
        passes = stage_seconds(
            self._tables, kind, own_host=options.processes, overlapped=overlapped
        )
        launching = launch_seconds(self._tables, kind)
        return [*passes, *(passes if device_type(slot.name) == "cpu" else launching)]

    def __call__(self, cuts: Sequence[int]) -> float:
        """The seconds of a step with stages between ``cuts`` (indices into those of the tables)."""
        options, trained = self._options, 1.0 if self._options.training else 0.0
        stages = []
        for q, (x, y) in enumerate(itertools.pairwise(cuts)):
            forward, backward, launch, launch_back = (float(t[x, y - 1]) for t in self._passes[q])
            stages.append(
                StagePlan(
                    index=q,
                    devices=(self._slots[q].name,),
                    layers=(),
                    nodes=(),
                    memory=NO_MEMORY,
                    budget=None,
                    reserve=0,
                    forward_seconds=forward,
                    backward_seconds=trained * backward,
                    forward_launch_seconds=launch,
                    backward_launch_seconds=trained * launch_back,
                )
            )
        owned = self._tables.state.owned
        parts = zip(self._slots, itertools.pairwise(cuts), strict=True)
        optimizer = update_seconds(
            options, ((slot, float(owned[x, y - 1])) for slot, (x, y) in parts)
        )
        return step_seconds(stages, self._transfers(cuts), options, optimizer)

    def _transfers(self, cuts: Sequence[int]) -> list[Transfer]:
        """What every stage sends to another, as one transfer for each pair of stages."""
        count = len(cuts) - 1
        ends = [self._tables.cuts[cut] for cut in cuts[1:-1]]
        source = np.searchsorted(ends, self._makers, side="right")
        target = np.searchsorted(ends, self._readers, side="right")
        crossing = np.flatnonzero(source != target)
        # A stage receives a value once
        _, first = np.unique(self._makers[crossing] * count + target[crossing], return_index=True)
        sent = crossing[first]
        nbytes = np.zeros((count, count))
        np.add.at(nbytes, (source[sent], target[sent]), self._nbytes[sent])
        return [
            Transfer(
                value=f"to {q}",
                source=p,
                target=q,
                nbytes=int(nbytes[p, q]),
                seconds=float(nbytes[p, q])
                / min(self._slots[s].kind.link_bandwidth for s in (p, q)),
            )
            for p, q in zip(*np.nonzero(nbytes), strict=True)
        ]


def move_boundaries(
    clock: StepClock, cuts: Sequence[int], allowed: Sequence[Mask]
) -> tuple[int, ...]:
    """``cuts``, with one after the other moved to where the step is the shortest, until none gains anything.

    ``allowed[q][x, y]`` says whether stage q may be from cut x to cut y + 1. Every stage keeps some nodes.
    This is a local search: several cuts may be better elsewhere together.
    """
    best, shortest, calls = tuple(cuts), clock(cuts), 0
    most = min(_MOST_CALLS, _MOST_ACTIONS // (clock.microbatches * len(cuts)))
    while True:
        before = best
        for q in range(1, len(cuts) - 1):
            for cut in _places(best[q - 1] + 1, best[q], best[q + 1]):
                tried = (*best[:q], cut, *best[q + 1 :])
                pairs = enumerate(itertools.pairwise(tried))
                if calls < most and all(allowed[i][x, y - 1] for i, (x, y) in pairs):
                    calls += 1
                    step = clock(tried)
                    if step < shortest * (1 - _LEAST_GAIN):
                        best, shortest = tried, step
        if best == before or calls >= most:
            return best


def _places(first: int, now: int, end: int) -> list[int]:
    """Places in ``range(first, end)`` to which a boundary at ``now`` may move: near ones, and some others."""
    near = range(now - _NEAR, now + _NEAR + 1)
    others = np.linspace(first, end - 1, 2 * _NEAR).astype(int).tolist()
    return sorted({*near, *others} & {*range(first, end)} - {now})
