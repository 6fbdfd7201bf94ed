"""The best stages along one order of the nodes for one chain of devices, with exact peaks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from placer.cost import updates_together
from placer.partition.chain import Mask, Table, best_cuts, border_costs
from placer.partition.stage_cost.score import (
    OptimizerMemory,
    optimizer_bytes,
    peak_bytes,
    stage_seconds,
    transfer_seconds,
)
from placer.partition.stage_cost.tables import IntervalTables
from placer.partition.types import DeviceSlot, PlanningOptions
from placer.schedule import InFlight, in_flight_by_stage, make_schedule

SLACK = 1.005  # how far above the least peak the additive bounds of a proposal may go
_TIE = 1e-9  # the next criterion decides among equals only


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Stages of one order: ``cuts`` are indices into the cuts of ``tables``, one more than slots."""

    rank: tuple[float, ...]  # smaller is better
    tables: IntervalTables
    nodes: tuple[int, ...]
    slots: tuple[DeviceSlot, ...]
    cuts: tuple[int, ...]
    limit: float  # of every stage's peak as a share of its budget; above 1 it does not fit
    fullest: float  # the largest of these shares, 0 without budgets
    peak: float  # the largest peak as `StageCosts.peaks` has it
    bottleneck: float  # seconds of the slowest stage
    total: float  # seconds of all stages


def waiting_at(options: PlanningOptions, num_stages: int, stage_index: int) -> InFlight:
    """What waits at a stage under the schedule that is asked for."""
    if options.microbatches == 1 or not options.training:
        return InFlight(microbatches=options.microbatches, last_share=options.last_share)
    waiting = _waiting(options.schedule, num_stages, options.microbatches, options.last_share)
    return waiting[stage_index]


@functools.lru_cache(maxsize=64)
def _waiting(
    schedule: str, num_stages: int, microbatches: int, last_share: float
) -> tuple[InFlight, ...]:
    """`waiting_at` for every stage; searches ask for the same ones hundreds of times."""
    table = make_schedule(schedule, num_stages, microbatches)
    return in_flight_by_stage(table, last_share=last_share)


def optimizer_on(options: PlanningOptions, devices: Iterable[str]) -> OptimizerMemory:
    """What the optimizer needs where the parameters that it trains are on ``devices`` (names)."""
    if not options.training:
        return OptimizerMemory(state=0)
    return optimizer_bytes(options.optimizer, together=updates_together(devices))


def solve_order(
    tables: IntervalTables,
    nodes: Sequence[int],
    chain: Sequence[DeviceSlot],
    pinned: Sequence[str | None],
    options: PlanningOptions,
) -> Candidate | None:
    """The best stages along ``nodes`` for the devices of ``chain``; None where the pins forbid all.

    Where all stages can be within their budgets the objective decides, else the least overflow.
    """
    costs = StageCosts(tables, chain, pinned, options)
    enough = len(tables.cuts) - 1 >= len(chain)
    for empty in ([not enough] * len(chain), [True] * len(chain)):
        result = best_cuts(costs.shares, costs.held, combine="max", may_be_empty=empty)
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
            allowed = [a & (p <= near) for a, p in zip(allowed, costs.peaks, strict=True)]
        cuts = _fastest(costs.seconds, allowed, empty, options.objective)
    return _rated(costs, tables, nodes, chain, cuts, options)


def rate_stages(
    tables: IntervalTables,
    nodes: Sequence[int],
    chain: Sequence[DeviceSlot],
    cuts: Sequence[int],
    pinned: Sequence[str | None],
    options: PlanningOptions,
) -> Candidate:
    """The stages between ``cuts`` (indices), as `solve_order` would rank them."""
    costs = StageCosts(tables, chain, pinned, options)
    return _rated(costs, tables, nodes, chain, cuts, options)


def _rated(
    costs: StageCosts,
    tables: IntervalTables,
    nodes: Sequence[int],
    chain: Sequence[DeviceSlot],
    cuts: Sequence[int],
    options: PlanningOptions,
) -> Candidate:
    load = costs.along(costs.seconds, cuts)
    step = max(load) * (options.microbatches - 1) + sum(load)
    fullest = max(costs.along(costs.shares, cuts))
    peak = max(costs.along(costs.peaks, cuts))
    rank = (0.0, max(load), step)
    if options.objective == "memory" and fullest <= 1:
        rank = (peak, max(load), step)
    elif options.objective == "latency":
        rank = (0.0, sum(load), max(load))
    return Candidate(
        rank=(fullest if fullest > 1 else 0.0, *rank),
        tables=tables,
        nodes=tuple(nodes),
        slots=tuple(chain),
        cuts=tuple(cuts),
        limit=max(fullest, 1.0),
        fullest=fullest,
        peak=peak,
        bottleneck=max(load),
        total=sum(load),
    )


class StageCosts:
    """Seconds and peaks of all intervals at every position of a chain of devices.

    ``shares`` are of the budget, the reserve counted, 0 without one; ``peaks`` are comparable
    shares: of the budget, and without one of the largest that there is (or in bytes, if none is).
    """

    def __init__(
        self,
        tables: IntervalTables,
        chain: Sequence[DeviceSlot],
        pinned: Sequence[str | None],
        options: PlanningOptions,
    ) -> None:
        largest = reference_bytes(chain)
        self.seconds, self.shares, self.peaks, self.held = [], [], [], []
        for q, slot in enumerate(chain):
            count = waiting_at(options, len(chain), q)
            updated = [slot] if options.processes else chain
            kept = optimizer_on(options, (other.name for other in updated))
            peak = peak_bytes(tables, count, kept, training=options.training)
            self.seconds.append(_seconds(tables, slot, options))
            self.shares.append(_share(peak, slot))
            self.peaks.append(peak / largest if slot.budget is None else self.shares[-1])
            self.held.append(_pin_mask(tables, pinned, slot.name))

    def allowed(self, limit: float) -> list[Mask]:
        return [h & (s <= limit) for h, s in zip(self.held, self.shares, strict=True)]

    def along(self, loads: Sequence[Table], cuts: Sequence[int]) -> list[float]:
        """The loads of the stages between ``cuts`` that are not empty."""
        pairs = enumerate(itertools.pairwise(cuts))
        return [float(loads[q][x, y - 1]) for q, (x, y) in pairs if y > x]


def reference_bytes(chain: Sequence[DeviceSlot]) -> float:
    """What a peak is a share of where its device has no budget."""
    return float(max((s.budget for s in chain if s.budget is not None), default=1))


def border_alternatives(
    candidate: Candidate, pinned: Sequence[str | None], options: PlanningOptions
) -> list[tuple[float, int | None]]:
    """For every border the best criterion with it anywhere else on the order, and that cut.

    The other borders are then free to move. ``inf`` and None where it cannot be elsewhere.
    """
    costs = StageCosts(candidate.tables, candidate.slots, pinned, options)
    combine: Literal["max", "sum"] = "sum" if options.objective == "latency" else "max"
    loads = costs.peaks if options.objective == "memory" else costs.seconds
    if candidate.limit > 1:
        loads = costs.shares
    table = border_costs(loads, costs.allowed(candidate.limit), combine=combine)
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
    near = [a & (t <= result[1] * (1 + _TIE)) for a, t in zip(allowed, times, strict=True)]
    second = best_cuts(times, near, combine="sum", may_be_empty=empty)
    assert second is not None
    return second[0]


def _seconds(tables: IntervalTables, slot: DeviceSlot, options: PlanningOptions) -> Table:
    forward, backward = stage_seconds(tables, slot.kind, own_host=options.processes)
    moved = transfer_seconds(tables, slot.kind, training=options.training)
    return forward + moved + (backward if options.training else 0.0)


def _share(peak: Table, slot: DeviceSlot) -> Table:
    """Peak and reserve as a share of the budget; 0 where there is none."""
    if slot.budget is None:
        return np.zeros_like(peak)
    return (peak + slot.reserve) / slot.budget if slot.budget else np.full_like(peak, np.inf)


def _pin_mask(tables: IntervalTables, pinned: Sequence[str | None], name: str) -> Mask:
    """Which intervals hold no node that is pinned to another device."""
    foreign = np.cumsum([0, *(p is not None and p != name for p in pinned)])
    at = foreign[np.asarray(tables.cuts)]
    mask: Mask = at[None, 1:] == at[:-1, None]
    return mask
