"""Recompute and offload "auto": what a placement needs to fit, at the least extra time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol

from placer.cost import CostTable, with_regions
from placer.partition import DeviceSlot, Partition, PlanningOptions, rate_partition
from placer.partition.candidate import in_flight_at
from placer.partition.policy.cheapest import StagePolicy, choose_stage_policy, keys_of
from placer.partition.policy.least import least_extra_seconds
from placer.partition.policy.search import PolicySearch
from placer.partition.policy.types import KEEP, Policy, StageLimits
from placer.plan.types import StageMemory
from placer.program import Program
from placer.regions import RegionKey, region_boundaries, whole_groups

# How often the boundaries are moved to where they are best for stages as light as can be.
_MOVES = 4
_ROUNDS = 4  # how often a stage's limit is corrected by what the formula says of its answer


class Choose(Protocol):
    """Partitions under these costs; ``more_pins`` are nodes and their devices."""

    def __call__(self, costs: CostTable, more_pins: Mapping[str, str]) -> Partition: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """A partition with its regions; ``least_seconds`` bounds the extra time of its stages from below."""

    costs: CostTable
    partition: Partition
    extra_seconds: float
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A partition with its regions, and the policies that they come from.

    ``own``: they are those of the partition's own stages, one each; no other partition was looked
    for under their costs.
    """

    costs: CostTable
    partition: Partition
    stages: tuple[StagePolicy, ...]
    own: bool = False

    @property
    def extra_seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


def choose_policy(
    program: Program,
    costs: CostTable,
    keys: Sequence[RegionKey | None],
    choices: Collection[Policy],
    slots: Sequence[DeviceSlot],
    options: PlanningOptions,
    choose: Choose,
    *,
    first: Partition | None = None,
    at_once: bool = False,
) -> PolicyChoice:
    """A placement that fits the budgets at little extra time, or else with the least overflow.

    ``costs`` are without regions; ``keys`` are those that the spec settles. ``choose(costs, pins)``
    partitions. Two partitions are tried: that of the plain costs, and that of the costs with the
    model treated as one stage; in each the policy of each stage is chosen by itself
    (`placer.partition.policy.cheapest`). Without any budget and with the objective "memory", every stage
    gets its least peak. Where there is no budget, or that does not fit, the boundaries of the best are
    moved to where they are best for stages as light as can be, and so on: a local search.

    ``first`` is the partition of the plain costs, where it is known already. ``at_once``: the search
    ends with the first placement that fits, whatever time its stages add.
    """
    plain = with_regions(costs, keys)
    first = first or choose(plain, {})
    if not is_heavy(first, choices, slots, options):
        return PolicyChoice(costs=plain, partition=first, extra_seconds=0.0, least_seconds=0.0)
    limited = any(slot.budget is not None for slot in slots)
    search = _Search(program, costs, keys, choices, options, limited=limited)
    everything = list(range(len(costs.names)))
    unlimited = StageLimits(static=0.0, budget=0.0, held=1, all_gradients=False)
    stage = search.labelled(everything, (), first.slots[0], unlimited)
    unpinned = partial(choose, more_pins={})
    if at_once and limited and (light := search.fitting(first, unpinned)) is not None:
        return PolicyChoice(
            costs=light.costs,
            partition=light.partition,
            extra_seconds=light.extra_seconds,
            least_seconds=0.0,
        )
    untreated = _Found(costs=plain, partition=first, stages=())
    start = search.found([choose_stage_policy(stage, choices, unlimited)], unpinned)
    found = [search.improve(first), start, search.improve(start.partition)]
    moved: set[object] = set()
    for _ in range(_MOVES):
        if limited and any(plan.partition.fits for plan in found):
            break
        apart = [plan for plan in found if len(plan.partition.stages) > 1]
        ahead = [plan for plan in apart if _boundaries(plan.partition) not in moved]
        if not ahead:
            break
        now = min(ahead, key=_rank).partition
        moved.add(_boundaries(now))
        found.append(search.found(search.most_saving(now), unpinned))
        found.append(search.improve(found[-1].partition))
    best = min([untreated, *found], key=_rank)
    if best.own:  # what is known about other placements, for the plan to tell
        described = choose(best.costs, _pins(best.partition))
        if _boundaries(described) == _boundaries(best.partition):
            best = replace(best, partition=described)
    return PolicyChoice(
        costs=best.costs,
        partition=best.partition,
        extra_seconds=best.extra_seconds,
        least_seconds=search.least(best) if limited and best.partition.fits else 0.0,
    )


def is_heavy(
    first: Partition,
    choices: Collection[Policy],
    slots: Sequence[DeviceSlot],
    options: PlanningOptions,
) -> bool:
    """Whether a policy is needed for the partition of the plain costs: is any allowed, and does it gain?"""
    limited = any(slot.budget is not None for slot in slots)
    enough = first.fits and (limited or options.objective != "memory")
    return bool(choices) and not enough


def _pins(partition: Partition) -> dict[str, str]:
    return {name: slot.name for slot, nodes in partition.placed for name in nodes}


def _boundaries(partition: Partition) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((slot.name, nodes) for slot, nodes in partition.placed)


def _rank(plan: _Found) -> tuple[bool, float, float]:
    partition = plan.partition
    over = max((_excess(partition, slot) for slot in partition.slots), default=0.0)
    limited = any(slot.budget is not None for slot in partition.slots)
    worst = over if limited else max(partition.peaks.values())
    return (
        not partition.fits,
        worst if not partition.fits or not limited else 0.0,
        partition.seconds,
    )


def _excess(partition: Partition, slot: DeviceSlot) -> float:
    if slot.budget is None:
        return 0.0
    return max(0.0, partition.peaks[slot.name] + slot.reserve - slot.budget)


class _Search:
    """Chooses the policies of the stages of a given partition."""

    def __init__(
        self,
        program: Program,
        costs: CostTable,
        keys: Sequence[RegionKey | None],
        choices: Collection[Policy],
        options: PlanningOptions,
        *,
        limited: bool,
    ) -> None:
        self._program = program
        self._costs = costs
        self._keys = tuple(keys)
        self._choices = choices
        self._options = options
        self._limited = limited
        self._boundaries = region_boundaries(program)
        self._settled = dict.fromkeys(self._boundaries.unsafe, KEEP)
        for node, key in enumerate(self._keys):
            if key is not None:
                self._settled[node] = Policy(recompute=key.recompute, offload=key.offload)

    def labelled(
        self, nodes: Sequence[int], before: Collection[int], slot: DeviceSlot, limits: StageLimits
    ) -> PolicySearch:
        return PolicySearch(
            self._costs,
            nodes,
            before,
            self._boundaries,
            self._settled,
            slot.kind,
            all_gradients=limits.all_gradients,
        )

    def costs_of(self, stages: Sequence[StagePolicy]) -> CostTable:
        """The costs with the stages' regions, and those that are settled."""
        layers = [self._program.layer_of[name] for name in self._program.order]
        keys = list(self._keys)
        for stage in stages:
            for node, key in keys_of(layers, stage.runs).items():
                keys[node] = keys[node] or key
        return with_regions(self._costs, whole_groups(self._program, keys))

    def _stages(self, partition: Partition) -> tuple[list[PolicySearch], list[StageLimits]]:
        stages = partition.stages
        position = {name: i for i, name in enumerate(self._program.order)}
        nodes = [sorted(position[name] for name in stage.nodes) for stage in stages]
        limits = [self._limits(partition, index) for index in range(len(stages))]
        labelled = [
            self.labelled(inside, list(chain(*nodes[:index])), slot, limit)
            for index, (inside, slot, limit) in enumerate(
                zip(nodes, partition.slots, limits, strict=True)
            )
        ]
        return labelled, limits

    def found(
        self, stages: Sequence[StagePolicy], choose: Callable[[CostTable], Partition]
    ) -> _Found:
        """The partition that is chosen when ``stages`` are treated so."""
        costs = self.costs_of(stages)
        return _Found(costs=costs, partition=choose(costs), stages=tuple(stages))

    def most_saving(self, partition: Partition) -> list[StagePolicy]:
        """What gives every stage of ``partition`` its least peak."""
        return [
            choose_stage_policy(stage, self._choices, replace(limit, budget=0.0))
            for stage, limit in zip(*self._stages(partition), strict=True)
        ]

    def fitting(
        self, partition: Partition, choose: Callable[[CostTable], Partition]
    ) -> _Found | None:
        """A placement that fits, each stage as light as can be, if it is found from ``partition`` on."""
        seen: set[object] = set()
        while len(seen) < _MOVES and _boundaries(partition) not in seen:
            seen.add(_boundaries(partition))
            stages = partition.placed
            rate = partial(rate_partition, self._program, stages=stages, options=self._options)
            light = self.most_saving(partition)
            for way in (rate, choose):
                found = self.found(light, way)
                if found.partition.fits:
                    return found
            partition = found.partition
        return None

    def improve(self, partition: Partition) -> _Found:
        """``partition`` with the regions that its stages need."""
        stages = partition.placed
        rate = partial(rate_partition, self._program, stages=stages, options=self._options)
        labelled, limits = self._stages(partition)
        targets = [limit.budget for limit in limits]
        best: _Found | None = None
        for _ in range(_ROUNDS):
            treated = [
                choose_stage_policy(stage, self._choices, replace(limit, budget=target))
                for stage, limit, target in zip(labelled, limits, targets, strict=True)
            ]
            found = replace(self.found(treated, rate), own=True)
            again = found.partition
            if best is None or _rank(found) < _rank(best):
                best = found
            # The labels' sums may be a little off: correct each limit by what the formula says.
            rows = zip(again.stages, treated, limits, strict=True)
            errors = [_peak(stage.memory, limit) - label.peak for stage, label, limit in rows]
            corrected = [limit.budget - error for limit, error in zip(limits, errors, strict=True)]
            if not self._limited or corrected == targets:
                break
            targets = corrected
        assert best is not None
        return best

    def least(self, found: _Found) -> float:
        """What the stages of ``found`` cost at the least, however they are treated.

        Where the formula says less than the labels' sums, the limit is as much wider.
        """
        if not found.own:
            return 0.0
        least = 0.0
        rows = zip(
            found.partition.stages, found.stages, *self._stages(found.partition), strict=True
        )
        for stage, treated, labelled, limits in rows:
            if not treated.seconds:
                continue
            off = max(0.0, treated.peak - _peak(stage.memory, limits))
            wider = replace(limits, budget=limits.budget + off)
            least += least_extra_seconds(labelled, self._choices, wider, answer=treated.seconds)
        return least

    def _limits(self, partition: Partition, index: int) -> StageLimits:
        stage = partition.stages[index]
        count = in_flight_at(self._options, len(partition.stages), index)
        slot = partition.slots[index]
        budget = float("inf") if self._limited else 0.0
        if slot.budget is not None:
            budget = slot.budget - slot.reserve
        shared = [i for i, other in enumerate(partition.slots) if other == slot]
        running = [
            partition.stages[i].memory.peak + _beside(partition, {*shared} - {i, index}, i)
            for i in shared
            if i > index
        ]
        return StageLimits(
            static=_static(stage.memory),
            budget=budget,
            held=count.most,
            all_gradients=count.microbatches > 1,
            others=_beside(partition, {*shared} - {index}, index),
            later=max(running, default=0),
        )


def _peak(memory: StageMemory, limits: StageLimits) -> float:
    """By the formula, what `StageLimits.peak` says by labels."""
    waiting = limits.static + limits.later + limits.held * memory.saved
    return max(memory.peak + limits.others, waiting if limits.later else 0.0)


def _static(memory: StageMemory) -> int:
    return memory.parameters + memory.buffers + memory.optimizer


def _beside(partition: Partition, others: Collection[int], running: int) -> int:
    """What the stages ``others`` hold, before and after the one that is ``running``."""
    memories = {i: partition.stages[i].memory for i in others}
    return sum(
        _static(memory) + (memory.saved if i < running else memory.gradients)
        for i, memory in memories.items()
    )
