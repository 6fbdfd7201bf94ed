"""Finds the best stages along one order of the nodes, for one chain of devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from placer.machine.catalogue import DeviceKind
from placer.machine.devices import device_type, updates_together
from placer.partition.chain import Mask, Table, best_cuts, boundary_costs, for_each
from placer.partition.stage_cost.optimizer import (
    OptimizerMemory,
    optimizer_bytes,
    optimizer_seconds,
)
from placer.partition.stage_cost.score import peak_bytes, stage_seconds, transfer_seconds
from placer.partition.stage_cost.tables import IntervalTables
from placer.partition.types import DeviceSlot, PlanningOptions
from placer.schedule import InFlight, in_flight_by_stage, make_schedule, merge_backward

Bytes = TypeVar("Bytes", float, Table)

_TIE = 1e-9  # relative difference up to which candidates are equal, so the next criterion decides
_EVEN = 1e-6  # weight of the even distribution of work, which decides between steps of equal length


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages along one order of nodes; stage q is between cuts q and q + 1, on device q of ``slots``.

    Shares are by `peak_share`.
    """

    rank: tuple[float, ...]  # by which candidates are compared; smaller is better
    tables: IntervalTables
    nodes: tuple[int, ...]
    slots: tuple[DeviceSlot, ...]
    cuts: tuple[int, ...]  # indices into the cuts of ``tables``
    fullest: float  # the largest peak as a share; above 1 it does not fit, 0 without budgets
    peak: float  # the largest of `peak_share`

    @property
    def limit(self) -> float:
        """The limit on every device's share: 1, or more if the candidate does not fit."""
        return max(self.fullest, 1.0)

    @property
    def stages(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The device of every stage, and its nodes in the order in which it runs them."""
        ends = itertools.pairwise(self.tables.cuts[cut] for cut in self.cuts)
        return tuple(
            (slot.name, self.nodes[begin:end])
            for slot, (begin, end) in zip(self.slots, ends, strict=True)
        )


def rank_candidate(
    options: PlanningOptions, *, fullest: float, peak: float, seconds: Sequence[float], step: float
) -> tuple[float, ...]:
    """The key for comparing candidates: first the overflow, then the objective, then seconds.

    ``fullest`` and ``peak`` are as in `Candidate`, ``step`` is by `steady_step`; ``seconds`` has those of
    every stage or device.
    """
    slowest, total = max(seconds), sum(seconds)
    found = (0.0, slowest, step)
    if options.objective == "memory" and fullest <= 1:
        found = (peak, slowest, step)
    elif options.objective == "latency":
        found = (0.0, total, slowest)
    elif options.objective == "throughput":
        found = (0.0, step, slowest)
    return (fullest if fullest > 1 else 0.0, *found)


def steady_step(
    options: PlanningOptions, slots: Iterable[DeviceSlot], slowest: float, total: float
) -> float:
    """Seconds of a step if one micro-batch takes ``total``, and the others follow ``slowest`` seconds apart.

    On the CPUs of one process, micro-batches run one after the other.
    """
    if run_one_after_the_other(options, slots):
        slowest = total
    return slowest * (options.microbatches - 1) + total


def run_one_after_the_other(options: PlanningOptions, slots: Iterable[DeviceSlot]) -> bool:
    """Do devices never work at the same time, because they are the CPUs of one process?"""
    return not options.processes and all(device_type(slot.name) == "cpu" for slot in slots)


def update_seconds(options: PlanningOptions, owned: Iterable[tuple[DeviceSlot, float]]) -> float:
    """Seconds of the optimizer's step, for devices that each own so many bytes of trained parameters.

    With those to gather the weights, if ranks have the state of pieces of them.
    """
    if not options.training:
        return 0.0
    found, ranks = list(owned), options.state_layout.optimizer
    seconds = [
        optimizer_seconds(nbytes / ranks, options.optimizer, slot.kind)
        + options.links.gather_seconds(nbytes, ranks=ranks, stride=options.grid(len(found)).stride)
        for slot, nbytes in found
    ]
    return sum(seconds) if run_one_after_the_other(options, [s for s, _ in found]) else max(seconds)


def in_flight_at(options: PlanningOptions, num_stages: int, stage_index: int) -> InFlight:
    """The micro-batches in flight at a stage under the schedule of ``options``."""
    if options.microbatches == 1 or not options.training:
        return InFlight(microbatches=options.microbatches, last_share=options.last_share)
    key = options.schedule, num_stages, options.microbatches, options.last_share
    return _in_flight(*key, split=options.processes)[stage_index]


@functools.lru_cache(maxsize=64)
def _in_flight(
    schedule: str, num_stages: int, microbatches: int, last_share: float, *, split: bool
) -> tuple[InFlight, ...]:
    """`in_flight_at` for every stage; cached, because a search asks for the same ones hundreds of times."""
    table = make_schedule(schedule, num_stages, microbatches)
    return in_flight_by_stage(table if split else merge_backward(table), last_share=last_share)


def copies_overlap(options: PlanningOptions, slot: DeviceSlot) -> bool:
    """Whether copies to and from the host overlap with computation; a CPU has no streams for that."""
    return options.offload_overlap and device_type(slot.name) == "cuda"


def optimizer_on(options: PlanningOptions, devices: Iterable[str]) -> OptimizerMemory:
    """The memory that the optimizer needs, if its parameters are on ``devices`` (names)."""
    if not options.training:
        return OptimizerMemory(state=0)
    whole = optimizer_bytes(options.optimizer, together=updates_together(devices))
    return whole.divided(options.state_layout.optimizer)


def solve_order(costs: StageCosts, nodes: Sequence[int]) -> Candidate | None:
    """The best stages along ``nodes`` on the chain of ``costs``; None if the pins rule out all.

    If all stages can be within their budgets the objective decides, otherwise the least overflow.
    """
    options, count = costs.options, len(costs.chain)
    enough = len(costs.tables.cuts) - 1 >= count
    for empty in ([not enough] * count, [True] * count):
        result = best_cuts(costs.shares, costs.follow_pins, combine="max", may_be_empty=empty)
        if result is not None:
            break
    else:
        return None
    cuts, least = result
    if least <= 1:
        allowed = costs.allowed(1.0)
        if options.objective == "memory":
            result = best_cuts(costs.peaks, allowed, combine="max", may_be_empty=empty)
            assert result is not None
            near = result[1] * (1 + _TIE)
            allowed = for_each(lambda a, p: a & (p <= near), allowed, costs.peaks)
        if options.objective == "throughput":
            cuts = _shortest_step(costs, allowed, empty)
        else:
            cuts = _fastest(costs.seconds, allowed, empty, options.objective)
    return rate_stages(costs, nodes, cuts)


def _shortest_step(
    costs: StageCosts, allowed: Sequence[Mask], empty: Sequence[bool]
) -> tuple[int, ...]:
    """Cuts of a short step, by `steady_step`: those of the least sum, or of the fastest slowest stage.

    A step is the time of one micro-batch, a sum over the stages, and the slowest stage's time for every other
    one. Boundaries are moved from here (`placer.partition.steps`).
    """
    whole = costs.once[0][0, -1] or 1.0
    loads = for_each(lambda once: once + _EVEN * once**2 / whole, costs.once)
    result = best_cuts(loads, allowed, combine="sum", may_be_empty=empty)
    slowest = best_cuts(costs.seconds, allowed, combine="max", may_be_empty=empty)
    assert result is not None and slowest is not None
    return min((costs.step(cuts), cuts) for cuts, _ in (result, slowest))[1]


def rate_stages(costs: StageCosts, nodes: Sequence[int], cuts: Sequence[int]) -> Candidate:
    """The stages between ``cuts`` (indices into those of the tables), ranked as by `solve_order`."""
    fullest = max(costs.along(costs.shares, cuts))
    peak = max(costs.along(costs.peaks, cuts))
    seconds, step = costs.along(costs.seconds, cuts), costs.step(cuts)
    return Candidate(
        rank=rank_candidate(costs.options, fullest=fullest, peak=peak, seconds=seconds, step=step),
        tables=costs.tables,
        nodes=tuple(nodes),
        slots=costs.chain,
        cuts=tuple(cuts),
        fullest=fullest,
        peak=peak,
    )


class StageCosts:
    """Costs of all intervals at every position of a chain of devices: ``[q][x, y]`` as in `best_cuts`.

    ``pinned`` has for each node of the order the device that it must be on, or None.
    ``seconds`` include all transfers of a stage, ``once`` only what it receives, so that the sum over stages
    has every transfer once. ``peaks`` are by `peak_share`; ``shares`` are the same, but 0 without a
    budget. ``follow_pins`` says whether an interval has no node that is pinned to another device.
    """

    def __init__(
        self,
        tables: IntervalTables,
        chain: Sequence[DeviceSlot],
        pinned: Sequence[str | None],
        options: PlanningOptions,
    ) -> None:
        largest = reference_bytes(chain)
        self.tables, self.options, self.chain = tables, options, tuple(chain)
        passes = 2 if options.training else 1
        # For each stage what its tables depend on, which is the same for most
        kinds = [slot.kind for slot in chain]
        alike = {(slot.budget, slot.withheld): slot for slot in chain}
        limits = [alike[slot.budget, slot.withheld] for slot in chain]
        names = [slot.name if slot.name in pinned else "" for slot in chain]
        counts = [in_flight_at(options, len(chain), q) for q in range(len(chain))]
        together = optimizer_on(options, (slot.name for slot in chain))
        kept = [
            optimizer_on(options, [slot.name]) if options.processes else together for slot in chain
        ]
        needed = for_each(
            lambda count, kept: peak_bytes(tables, count, kept, training=options.training),
            counts,
            kept,
        )
        computed = for_each(
            lambda kind, overlapped: _computed_seconds(
                tables, kind, options, overlapped=overlapped
            ),
            kinds,
            [copies_overlap(options, slot) for slot in chain],
        )
        self.seconds = for_each(
            lambda own, kind: own + transfer_seconds(tables, kind, training=options.training),
            computed,
            kinds,
        )
        self.once = for_each(
            lambda own, kind: own + tables.computed * passes / kind.link_bandwidth, computed, kinds
        )
        self.peaks = for_each(lambda peak, slot: peak_share(peak, slot, largest), needed, limits)
        self.shares = for_each(
            lambda peak, slot: np.zeros_like(peak) if slot.budget is None else peak,
            self.peaks,
            limits,
        )
        self.follow_pins: list[Mask] = for_each(
            functools.partial(_follows_pins, tables, pinned), names
        )

    def allowed(self, limit: float) -> list[Mask]:
        """The intervals that follow the pins and take at most a share ``limit`` of their budgets."""
        return for_each(lambda f, s: f & (s <= limit), self.follow_pins, self.shares)

    def step(self, cuts: Sequence[int]) -> float:
        """The `steady_step` of the stages between ``cuts``."""
        slowest, total = max(self.along(self.seconds, cuts)), sum(self.along(self.once, cuts))
        return steady_step(self.options, self.chain, slowest, total)

    def along(self, loads: Sequence[Table], cuts: Sequence[int]) -> list[float]:
        """The entries of ``loads`` for the stages between ``cuts`` that are not empty."""
        pairs = enumerate(itertools.pairwise(cuts))
        return [float(loads[q][x, y - 1]) for q, (x, y) in pairs if y > x]


def reference_bytes(chain: Sequence[DeviceSlot]) -> float:
    """The bytes of which peaks are shares on devices without a budget: the largest budget, or 1 byte."""
    return float(max((s.budget for s in chain if s.budget is not None), default=1))


def peak_share(peak: Bytes, slot: DeviceSlot, reference: float) -> Bytes:
    """The share of its budget that a device needs for ``peak``; without a budget, ``peak / reference``.

    At most 1 if and only if ``slot.fits(peak)``.
    """
    if slot.budget is None:
        return peak / reference
    return (peak + slot.withheld) / max(slot.budget, 1)


def boundary_alternatives(
    candidate: Candidate, pinned: Sequence[str | None], options: PlanningOptions
) -> list[tuple[float, int | None]]:
    """For every boundary the best other cut, and the value of the objective with that cut.

    The other boundaries are then wherever they are best. ``(inf, None)`` if there is no other cut.
    """
    costs = StageCosts(candidate.tables, candidate.slots, pinned, options)
    combine: Literal["max", "sum"] = "sum" if options.objective == "latency" else "max"
    loads = costs.peaks if options.objective == "memory" else costs.seconds
    if candidate.limit > 1:
        loads = costs.shares
    table = boundary_costs(loads, costs.allowed(candidate.limit), combine=combine)
    found: list[tuple[float, int | None]] = []
    for q, cut in enumerate(candidate.cuts[1:-1]):
        row = table[q].copy()
        row[[0, cut, -1]] = np.inf
        best = int(np.argmin(row))
        found.append((float(row[best]), best if np.isfinite(row[best]) else None))
    return found


def _fastest(
    times: Sequence[Table], allowed: Sequence[Mask], empty: Sequence[bool], objective: str
) -> tuple[int, ...]:
    if objective == "latency":
        result = best_cuts(times, allowed, combine="sum", may_be_empty=empty)
        assert result is not None
        return result[0]
    result = best_cuts(times, allowed, combine="max", may_be_empty=empty)
    assert result is not None
    most = result[1] * (1 + _TIE)
    near = for_each(lambda a, t: a & (t <= most), allowed, times)
    second = best_cuts(times, near, combine="sum", may_be_empty=empty)
    assert second is not None
    return second[0]


def _computed_seconds(
    tables: IntervalTables, kind: DeviceKind, options: PlanningOptions, *, overlapped: bool
) -> Table:
    forward, backward = stage_seconds(
        tables, kind, own_host=options.processes, overlapped=overlapped
    )
    return forward + (backward if options.training else 0.0)


def _follows_pins(tables: IntervalTables, pinned: Sequence[str | None], name: str) -> Mask:
    """Whether each interval has no node that is pinned to another device than ``name``."""
    foreign = np.cumsum([0, *(p is not None and p != name for p in pinned)])
    at = foreign[np.asarray(tables.cuts)]
    mask: Mask = at[None, 1:] == at[:-1, None]
    return mask
