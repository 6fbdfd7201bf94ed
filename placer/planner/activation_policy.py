"""Chooses which activations to recompute or offload ("auto"), so that a plan fits at little extra time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol

from placer.cost import CostTable, with_regions
from placer.machine.devices import device_type
from placer.partition import MANY_STAGES, DeviceSlot, Partition, PlanningOptions, rate_partition
from placer.partition.candidate import in_flight_at
from placer.partition.policy.cheapest import (
    StagePolicy,
    choose_stage_policy,
    keys_of,
    least_host_bytes,
)
from placer.partition.policy.search import MAX_BLOCKS, PolicyCache, PolicySearch
from placer.partition.policy.types import KEEP, Policy, StageLimits
from placer.plan.types import StageMemory
from placer.planner.host_memory import estimate_host
from placer.program import Program
from placer.regions import RegionKey, region_boundaries, whole_groups

# A placement is given up if its stages, with their least peaks, need more than this many times a device's
# room.
_FAR = 1.25
_MAX_MOVES = 4  # how often boundaries are chosen again for stages with their least peaks
_MAX_BLOCKS_TOGETHER = 1_000  # of all stages, which get fewer blocks each where they are many
_MAX_ROUNDS = 4  # how often a stage's limit is corrected by the difference between two estimates
_CLOSE = 0.005  # a stage that fits keeps its limit if that would change by a smaller share


class Choose(Protocol):
    """Chooses a partition for ``costs``; ``more_pins`` maps nodes to the devices that they must be on."""

    def __call__(self, costs: CostTable, more_pins: Mapping[str, str]) -> Partition: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """A partition with the regions chosen for it, which are in the keys of ``costs``.

    ``options`` are those that it was chosen with.
    """

    options: PlanningOptions
    costs: CostTable
    partition: Partition
    extra_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A partition with its regions, and the policies that the regions come from.

    ``own``: the policies are those of the partition's own stages, one per stage. Otherwise they were made for
    other stages, and the partition was chosen under their costs. ``host_nbytes`` is the host memory that a
    replica takes, ``host_excess`` the part of it beyond the host's budget.
    """

    costs: CostTable
    partition: Partition
    stages: tuple[StagePolicy, ...]
    own: bool = False
    host_nbytes: int = 0
    host_excess: int = 0

    @property
    def fits(self) -> bool:
        return self.partition.fits and not self.host_excess

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
    """A placement that fits all budgets at little extra time, or else one with the least overflow.

    The budgets include the host's, if the options have one. ``costs`` are without regions; ``keys`` are the
    regions that the spec requires. ``choose(costs, pins)`` returns a partition.

    Two partitions are tried: the one for the plain costs, and the one for costs under a policy chosen for the
    whole model as one stage. In each, a policy is then chosen for every stage separately
    (`placer.partition.policy.cheapest`); without a budget and with the objective "memory", it is the policy
    with the least peak. If there is no budget, or neither partition fits, a local search follows: give every
    stage of the best partition its least peak, choose the boundaries again under these costs, and repeat. Of
    more than `MANY_STAGES` stages, only the second partition is tried.

    ``first`` is the partition for the plain costs, if it is known. With ``at_once``, the search ends with the
    first placement that fits, whatever extra time it takes.
    """
    plain = with_regions(costs, keys)
    first = first or choose(plain, {})
    if not is_heavy(first, choices, slots, options):
        return PolicyChoice(options=options, costs=plain, partition=first, extra_seconds=0.0)
    limited = any(slot.budget is not None for slot in slots)
    search = _Search(program, costs, keys, choices, options, limited=limited)
    everything = list(range(len(costs.names)))
    unlimited = StageLimits(static=0.0, budget=0.0, in_flight=1, all_gradients=False)
    whole = search.policy_search(everything, (), first.slots[0], unlimited)
    unpinned = partial(choose, more_pins={})
    if at_once and limited:
        light = search.lightest(first, unpinned)
        if light.fits or _is_far(light.partition):
            return PolicyChoice(
                options=options,
                costs=light.costs,
                partition=light.partition,
                extra_seconds=light.extra_seconds,
            )
    kept = search.made(plain, first, [])
    start = search.found([choose_stage_policy(whole, choices, unlimited)], unpinned)
    are_few = len(first.slots) <= MANY_STAGES
    found = [search.improve(first)] if are_few else []
    found.append(start)
    if not are_few or _boundaries(start.partition) != _boundaries(first):
        found.append(search.improve(start.partition))
    moved: set[object] = set()
    for _ in range(_MAX_MOVES * are_few):
        if limited and any(plan.fits for plan in found):
            break
        apart = [plan for plan in found if len(plan.partition.stages) > 1]
        ahead = [plan for plan in apart if _boundaries(plan.partition) not in moved]
        if not ahead:
            break
        now = min(ahead, key=_rank).partition
        moved.add(_boundaries(now))
        found.append(search.found(search.most_saving(now), unpinned))
        found.append(search.improve(found[-1].partition))
    best = min([kept, *found], key=_rank)
    if best.own and are_few:
        # Choose it again with pins, to get the facts about alternatives that a plan reports.
        pins = {name: slot.name for slot, nodes in best.partition.placed for name in nodes}
        described = choose(best.costs, pins)
        if _boundaries(described) == _boundaries(best.partition):
            best = replace(best, partition=described)
    extra = best.extra_seconds
    if options.offload_overlap and any(key and key.offload for key in best.costs.keys):
        # The search adds up the seconds of copies as if they did not overlap with computation.
        without = search.rate(plain, best.partition)
        extra = max(0.0, _busy_seconds(best.partition) - _busy_seconds(without))
    return PolicyChoice(
        options=options, costs=best.costs, partition=best.partition, extra_seconds=extra
    )


def is_heavy(
    first: Partition,
    choices: Collection[Policy],
    slots: Sequence[DeviceSlot],
    options: PlanningOptions,
) -> bool:
    """Whether a policy is allowed and could improve ``first``, the partition for the plain costs."""
    limited = any(slot.budget is not None for slot in slots)
    enough = first.fits and (limited or options.objective != "memory")
    return bool(choices) and not enough


def _busy_seconds(partition: Partition) -> float:
    """Seconds of a micro-batch, summed over the stages."""
    return sum((s.forward_seconds or 0.0) + (s.backward_seconds or 0.0) for s in partition.stages)


def _boundaries(partition: Partition) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((slot.name, nodes) for slot, nodes in partition.placed)


def _rank(plan: _Found) -> tuple[bool, float, float]:
    partition = plan.partition
    over = max((_excess(partition, slot) for slot in partition.slots), default=0.0)
    limited = any(slot.budget is not None for slot in partition.slots)
    worst = over + plan.host_excess if limited else max(partition.peaks.values())
    return (not plan.fits, worst if not plan.fits or not limited else 0.0, partition.seconds)


def _is_far(partition: Partition) -> bool:
    """Whether some device needs so much more than it has that another policy is unlikely to make it fit."""
    return any(
        slot.room is not None and partition.peaks[slot.name] > _FAR * slot.room
        for slot in partition.slots
    )


def _excess(partition: Partition, slot: DeviceSlot) -> float:
    return 0.0 if slot.room is None else max(0.0, partition.peaks[slot.name] - slot.room)


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
        self._caches: dict[Hashable, PolicyCache] = {}
        self._settled = dict.fromkeys(self._boundaries.unsafe, KEEP)
        for node, key in enumerate(self._keys):
            if key is not None:
                self._settled[node] = Policy(recompute=key.recompute, offload=key.offload)

    def policy_search(
        self,
        nodes: Sequence[int],
        before: Collection[int],
        slot: DeviceSlot,
        limits: StageLimits,
        max_blocks: int = MAX_BLOCKS,
    ) -> PolicySearch:
        """The search for policies of a stage with ``nodes``; ``before`` are the nodes of earlier stages."""
        return PolicySearch(
            self._costs,
            nodes,
            before,
            self._boundaries,
            self._settled,
            slot.kind,
            all_gradients=limits.all_gradients,
            pinned=device_type(slot.name) == "cuda",
            max_blocks=max_blocks,
            caches=self._caches,
        )

    def costs_of(self, stages: Sequence[StagePolicy]) -> CostTable:
        """The costs with the regions of ``stages`` and those that the spec requires."""
        layers = [self._program.nodes[name].layer for name in self._program.order]
        keys = list(self._keys)
        for stage in stages:
            for node, key in keys_of(layers, stage.runs).items():
                keys[node] = keys[node] or key
        groups = whole_groups(self._program, keys)
        return with_regions(self._costs, groups)

    def _stages(
        self, partition: Partition, indices: Iterable[int]
    ) -> Iterator[tuple[PolicySearch, StageLimits]]:
        """The searches for policies of these stages, and their limits."""
        position = {name: i for i, name in enumerate(self._program.order)}
        nodes = [sorted(position[name] for name in stage.nodes) for stage in partition.stages]
        max_blocks = max(1, min(MAX_BLOCKS, _MAX_BLOCKS_TOGETHER // len(nodes)))
        for index in indices:
            limits, before = self._limits(partition, index), list(chain(*nodes[:index]))
            slot = partition.slots[index]
            yield self.policy_search(nodes[index], before, slot, limits, max_blocks), limits

    def found(
        self, stages: Sequence[StagePolicy], choose: Callable[[CostTable], Partition]
    ) -> _Found:
        """The partition that ``choose`` returns under the costs of the policies ``stages``."""
        costs = self.costs_of(stages)
        return self.made(costs, choose(costs), stages)

    def made(self, costs: CostTable, partition: Partition, stages: Sequence[StagePolicy]) -> _Found:
        """``partition``, which was chosen under ``costs``, with the policies ``stages``."""
        taken = estimate_host(costs, partition, self._options).reserved
        budget = self._options.host_budget
        return _Found(
            costs=costs,
            partition=partition,
            stages=tuple(stages),
            host_nbytes=taken,
            host_excess=0 if budget is None else max(0, taken - budget),
        )

    def rate(self, costs: CostTable, partition: Partition) -> Partition:
        """``partition`` with the memory and seconds of its stages under ``costs``."""
        return rate_partition(self._program, costs, partition.placed, self._options)

    def most_saving(self, partition: Partition) -> list[StagePolicy]:
        """The policies that give every stage of ``partition`` its least peak."""
        return [
            choose_stage_policy(stage, self._choices, replace(limit, budget=0.0))
            for stage, limit in self._stages(partition, range(len(partition.stages)))
        ]

    def lightest(self, partition: Partition, choose: Callable[[CostTable], Partition]) -> _Found:
        """The best placement found in which every stage has its least peak.

        The search starts from ``partition``. It ends when a placement fits or the best is far from fitting.
        """
        tried: list[_Found] = []
        seen: set[object] = set()
        while len(seen) < _MAX_MOVES and _boundaries(partition) not in seen:
            seen.add(_boundaries(partition))
            light = self.most_saving(partition)
            for way in (partial(self.rate, partition=partition), choose):
                tried.append(self.found(light, way))
                if tried[-1].fits:
                    return tried[-1]
            if _is_far(min(tried, key=_rank).partition):
                break
            partition = tried[-1].partition
        return min(tried, key=_rank)

    def improve(self, partition: Partition) -> _Found:
        """``partition`` with regions in the stages that need them in order to fit."""
        rate = partial(self.rate, partition=partition)
        best = replace(self.found([], rate), own=True)
        chosen = list(range(len(partition.stages)))
        if self._limited:
            chosen = self._too_full(best.partition)
        if not chosen:
            return best
        stages = list(self._stages(partition, chosen))
        targets = [limits.budget for _, limits in stages]
        host_budget = self._options.host_budget
        host_target = float("inf") if host_budget is None else float(host_budget)
        known: dict[tuple[StagePolicy, ...], _Found] = {}
        for _ in range(_MAX_ROUNDS):
            searches, limits = [search for search, _ in stages], [limit for _, limit in stages]
            aims = [
                replace(limit, budget=target) for limit, target in zip(limits, targets, strict=True)
            ]
            policies = tuple(self._within_host(searches, aims, host_target))
            if policies not in known:
                known[policies] = replace(self.found(policies, rate), own=True)
            found = known[policies]
            again = found.partition
            if _rank(found) < _rank(best):
                best = found
            # The peaks of a policy search differ a little from those of `rate_partition`. Correct each limit
            # by the difference.
            rows = zip(chosen, policies, limits, strict=True)
            errors = [
                _peak(again.stages[i].memory, limit) - policy.peak for i, policy, limit in rows
            ]
            full = self._too_full(again)
            corrected = [limit.budget - error for limit, error in zip(limits, errors, strict=True)]
            corrected = [
                new if i in full or abs(new - target) > _CLOSE * limit.budget else target
                for i, limit, new, target in zip(chosen, limits, corrected, targets, strict=True)
            ]
            host_before = host_target
            if host_budget is not None:
                sums = sum(
                    limit.in_flight * policy.hosted
                    for limit, policy in zip(limits, policies, strict=True)
                )
                host_target = host_budget - max(0.0, found.host_nbytes - sums)
            if not self._limited:
                corrected = targets
            late = [i for i in full if i not in chosen]
            if (corrected, host_target) == (targets, host_before) and not late:
                break
            added = list(self._stages(partition, late))
            chosen, stages = [*chosen, *late], [*stages, *added]
            targets = [*corrected, *(limits.budget for _, limits in added)]
        return best

    @staticmethod
    def _too_full(partition: Partition) -> list[int]:
        """The stages on devices that need more than they have, by index."""
        return [i for i, slot in enumerate(partition.slots) if _excess(partition, slot)]

    def _within_host(
        self, stages: Sequence[PolicySearch], limits: Sequence[StageLimits], budget: float
    ) -> list[StagePolicy]:
        """Policies of ``stages`` that together take at most ``budget`` bytes of host memory.

        If the best policies take more, every stage gets its minimum of host memory, and the rest is divided
        in proportion to what each stage wants beyond its minimum. This is a heuristic.
        """
        policies = [
            choose_stage_policy(stage, self._choices, limit)
            for stage, limit in zip(stages, limits, strict=True)
        ]
        wanted = [limit.in_flight * x.hosted for limit, x in zip(limits, policies, strict=True)]
        if sum(wanted) <= budget:
            return policies
        least = [
            min(nbytes, limit.in_flight * least_host_bytes(stage, self._choices, limit))
            for stage, limit, nbytes in zip(stages, limits, wanted, strict=True)
        ]
        for i, (stage, limit) in enumerate(zip(stages, limits, strict=True)):
            spare = max(0.0, budget - sum(least[i:]))
            more = sum(wanted[i:]) - sum(least[i:])
            share = least[i] + (wanted[i] - least[i]) * min(1.0, spare / more if more else 0.0)
            policies[i] = choose_stage_policy(
                stage, self._choices, replace(limit, host_budget=share / limit.in_flight + 1e-6)
            )
            budget -= limit.in_flight * policies[i].hosted
        return policies

    def _limits(self, partition: Partition, index: int) -> StageLimits:
        stage = partition.stages[index]
        count = in_flight_at(self._options, len(partition.stages), index)
        slot = partition.slots[index]
        budget: float = float("inf") if self._limited else 0.0
        if slot.room is not None:
            budget = slot.room
        shared = [i for i, other in enumerate(partition.slots) if other == slot]
        running = [
            partition.stages[i].memory.peak + _beside(partition, {*shared} - {i, index}, i)
            for i in shared
            if i > index
        ]
        waiting = 0.0
        if count.waiting:
            by_node = dict(zip(self._costs.names, self._costs.waiting_nbytes, strict=False))
            waiting = count.waiting * sum(by_node[node] for node in stage.nodes)
        return StageLimits(
            static=stage.memory.state + waiting,
            budget=budget,
            in_flight=count.most,
            all_gradients=count.microbatches > 1,
            others=_beside(partition, {*shared} - {index}, index),
            later=max(running, default=0),
        )


def _peak(memory: StageMemory, limits: StageLimits) -> float:
    """The peak of a stage computed from its ``memory``, comparable to `StageLimits.peak`."""
    retained = limits.static + limits.later + limits.in_flight * memory.saved
    return max(memory.peak + limits.others, retained if limits.later else 0.0)


def _beside(partition: Partition, others: Collection[int], running: int) -> int:
    """The bytes that the stages ``others`` keep on a device while the stage ``running`` runs."""
    memories = {i: partition.stages[i].memory for i in others}
    return sum(
        memory.state + (memory.saved if i < running else memory.gradients)
        for i, memory in memories.items()
    )
