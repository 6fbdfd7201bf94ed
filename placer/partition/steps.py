"""Lays out the steps of many placements along one order in time, to find the shortest."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placer.cost import CostTable
from placer.machine.devices import device_type
from placer.partition.candidate import Candidate, copies_overlap, update_seconds
from placer.partition.chain import Mask, Table
from placer.partition.stage_cost.score import launch_seconds, stage_seconds
from placer.partition.types import DeviceSlot, PlanningOptions
from placer.plan.step_spans import lay_out_step
from placer.plan.types import NO_MEMORY, StagePlan, Transfer

_Array = NDArray[Any]

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
    latest: Callable[[Sequence[float]], float] = max,
) -> float:
    """The seconds of a step of ``stages``, laid out in time. They may be arrays (see `Operation`)."""
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
        state_layout=options.state_layout,
        latest=latest,
    )
    return latest([span.end for span in spans])


class StepClock:
    """The seconds of a step for other cuts along the order of ``candidate``, on its devices.

    They are those of `describe_partition` for one replica (in one process, launches of the others come in
    addition, wherever the cuts are), but overlapping copies to the host are not laid out. Placements of which
    the same stages send something to each other are laid out together, in arrays: that takes little longer
    than one of them, time in proportion to the values of the model and to the actions of a step.
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

    def __call__(self, placements: Sequence[Sequence[int]]) -> list[float]:
        """The seconds of a step of every placement: its cuts, as indices into those of the tables."""
        if not placements:
            return []
        cuts = np.array(placements)
        sent = self._sent(cuts)
        alike = defaultdict[bytes, list[int]](list)
        for i, nbytes in enumerate(sent):
            alike[(nbytes > 0).tobytes()].append(i)
        found = np.empty(len(cuts))
        for group in alike.values():
            found[group] = self._together(cuts[group].T, sent[group])
        return found.tolist()

    def _together(self, cuts: _Array, sent: _Array) -> _Array:
        """The seconds of a step of placements of which the same stages send something to each other.

        ``cuts`` has a column for each placement, and ``sent`` a matrix: the bytes from every stage to every
        other.
        """
        options, trained = self._options, 1.0 if self._options.training else 0.0
        stages = []
        for q, (x, y) in enumerate(itertools.pairwise(cuts)):
            seconds: list[Any] = [table[x, y - 1] for table in self._passes[q]]
            forward, backward, launch, launch_back = seconds
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
        transfers = [
            Transfer(
                value=f"to {q}",
                source=p,
                target=q,
                nbytes=int(sent[0, p, q]),
                seconds=sent[:, p, q] / min(self._slots[s].kind.link_bandwidth for s in (p, q)),
            )
            for p, q in zip(*np.nonzero(sent[0]), strict=True)
        ]
        latest = functools.partial(functools.reduce, np.maximum)
        step: _Array = np.array(step_seconds(stages, transfers, options, 0.0, latest=latest))
        owned = self._tables.state.owned
        updates = []
        for each in cuts.T:
            nbytes = [float(owned[x, y - 1]) for x, y in itertools.pairwise(each)]
            updates.append(update_seconds(options, zip(self._slots, nbytes, strict=True)))
        step += updates
        return step

    def _sent(self, cuts: _Array) -> _Array:
        """For every row of ``cuts``, the bytes that every stage sends to every other."""
        count = cuts.shape[1] - 1
        ends = np.array(self._tables.cuts)[cuts[:, 1:-1]]
        source, target = (
            np.array([np.searchsorted(each, places, side="right") for each in ends])
            for places in (self._makers, self._readers)
        )
        row, pair = np.nonzero(source != target)
        shape = len(cuts), count, len(self._tables.nodes)
        received = np.ravel_multi_index((row, target[row, pair], self._makers[pair]), shape)
        _, first = np.unique(received, return_index=True)  # a stage receives a value once
        row, pair = row[first], pair[first]
        nbytes = np.zeros((len(cuts), count, count))
        np.add.at(nbytes, (row, source[row, pair], target[row, pair]), self._nbytes[pair])
        return nbytes


def move_boundaries(
    clock: StepClock, cuts: Sequence[int], allowed: Sequence[Mask]
) -> tuple[int, ...]:
    """``cuts``, with one after the other moved to where the step is the shortest, until none gains anything.

    ``allowed[q][x, y]`` says whether stage q may be from cut x to cut y + 1. Every stage keeps some nodes.
    This is a local search: several cuts may be better elsewhere together.
    """
    best, shortest = tuple(cuts), clock([cuts])[0]
    left = _most_calls(clock, cuts)
    while True:
        before = best
        for q in range(1, len(cuts) - 1):
            tried = _moves(best, q, allowed)[:left]
            left -= len(tried)
            for step, cuts in zip(clock(tried), tried, strict=True):
                if step < shortest * (1 - _LEAST_GAIN):
                    best, shortest = cuts, step
        if best == before or left <= 0:
            return best


def other_places(
    clock: StepClock, cuts: Sequence[int], allowed: Sequence[Mask]
) -> list[tuple[float, int | None]]:
    """For every boundary the best other cut near it, and the step with that, as a multiple of the step now.

    The other boundaries stay where they are. ``(inf, None)`` if there is no other cut.
    """
    inner = range(1, len(cuts) - 1)
    most = max(2, _most_calls(clock, cuts) // max(1, len(inner)))
    moves = [
        sorted(_moves(cuts, q, allowed), key=lambda moved: abs(moved[q] - cuts[q]))[:most]
        for q in inner
    ]
    now, *others = clock([cuts, *itertools.chain(*moves)])
    steps = iter(others)
    return [
        min(((next(steps) / now, moved[q]) for moved in tried), default=(math.inf, None))
        for q, tried in zip(inner, moves, strict=True)
    ]


def _most_calls(clock: StepClock, cuts: Sequence[int]) -> int:
    return min(_MOST_CALLS, _MOST_ACTIONS // (clock.microbatches * len(cuts)))


def _moves(cuts: Sequence[int], q: int, allowed: Sequence[Mask]) -> list[tuple[int, ...]]:
    """``cuts`` with cut ``q`` at other places, where that is allowed."""
    moved = (
        (*cuts[:q], cut, *cuts[q + 1 :]) for cut in _places(cuts[q - 1] + 1, cuts[q], cuts[q + 1])
    )
    return [
        each
        for each in moved
        if all(allowed[i][x, y - 1] for i, (x, y) in enumerate(itertools.pairwise(each)))
    ]


def _places(first: int, now: int, end: int) -> list[int]:
    """Places in ``range(first, end)`` to which a boundary at ``now`` may move: near ones, and some others."""
    near = range(now - _NEAR, now + _NEAR + 1)
    others = np.linspace(first, end - 1, 2 * _NEAR).astype(int).tolist()
    return sorted({*near, *others} & {*range(first, end)} - {now})
