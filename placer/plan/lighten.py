"""Recompute and offload "auto": what a placement needs to fit, at the least extra time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from placer.capture import Capture
from placer.cost import CostTable, with_regions
from placer.partition import Demands, DeviceSlot, Partition
from placer.partition.candidate import waiting_at
from placer.partition.labels import KEEP, LabelledStage, StageLimits, Treatment
from placer.partition.least import least_extra_seconds
from placer.partition.lighten import Lightened, keys_of, lighten_stage
from placer.regions import RegionKey, cuttable_nodes, whole_groups

_MOVES = 2  # how often the borders are moved to where they are best for stages as light as can be
_ROUNDS = 4  # how often a stage's limit is corrected by what the formula says of its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class LightPlan:
    """A partition with its regions; ``least_seconds`` bounds the extra time of its stages from below."""

    costs: CostTable
    partition: Partition
    extra_seconds: float
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A partition with its regions, and per stage its labels, its limits and its extra time."""

    costs: CostTable
    partition: Partition
    treated: tuple[tuple[LabelledStage, StageLimits, float], ...]

    @property
    def extra_seconds(self) -> float:
        return sum(seconds for *_, seconds in self.treated)


def lighten(
    capture: Capture,
    costs: CostTable,
    keys: Sequence[RegionKey | None],
    choices: Collection[Treatment],
    slots: Sequence[DeviceSlot],
    demands: Demands,
    choose: Callable[[CostTable, Mapping[str, str]], Partition],
) -> LightPlan:
    """A placement that fits the budgets at little extra time, or else with the least overflow.

    ``costs`` are without regions; ``keys`` are those that the spec settles. ``choose(costs, pins)``
    partitions. Two partitions are tried: that of the plain costs, and that of the costs with every
    node treated; in each the stages are lightened one by one (`placer.partition.lighten`). Without
    any budget and with the objective "memory", every stage gets its least peak. Where there is no
    budget, or that does not fit, the borders are moved to where they are best for stages as light as
    can be, as long as that is better.
    """
    plain = with_regions(costs, keys)
    first = choose(plain, {})
    limited = any(slot.budget is not None for slot in slots)
    if not choices or (first.fits and (limited or demands.objective != "memory")):
        return LightPlan(costs=plain, partition=first, extra_seconds=0.0, least_seconds=0.0)
    search = _Search(capture, costs, keys, choices, demands, limited=limited)
    everything = list(range(len(costs.names)))
    unlimited = StageLimits(static=0.0, budget=0.0, held=1, grown=False)
    stage = search.labelled(everything, first.stages[0].device, unlimited)
    whole = lighten_stage(stage, choices, unlimited)
    treated = choose(search.costs_of([whole]), {})
    untreated = _Found(costs=plain, partition=first, treated=())
    found = [search.improve(partition, choose) for partition in (first, treated)]
    best = min([untreated, *found], key=_rank)
    for _ in range(_MOVES):
        if len(best.partition.stages) == 1 or (limited and best.partition.fits):
            break
        moved = search.improve(choose(search.lightest(best.partition), {}), choose)
        if _rank(moved) >= _rank(best):
            break
        best = moved
    return LightPlan(
        costs=best.costs,
        partition=best.partition,
        extra_seconds=best.extra_seconds,
        least_seconds=search.least(best) if limited and best.partition.fits else 0.0,
    )


def _rank(plan: _Found) -> tuple[bool, float, float]:
    partition = plan.partition
    over = max(
        (_excess(partition, stage.device) for stage in partition.stages), default=0.0
    )  # fmt: skip
    limited = any(stage.device.budget is not None for stage in partition.stages)
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
    """Lightens the stages of a given partition."""

    def __init__(
        self,
        capture: Capture,
        costs: CostTable,
        keys: Sequence[RegionKey | None],
        choices: Collection[Treatment],
        demands: Demands,
        *,
        limited: bool,
    ) -> None:
        self._capture = capture
        self._costs = costs
        self._keys = tuple(keys)
        self._choices = choices
        self._demands = demands
        self._limited = limited
        self._cuttable, unsafe = cuttable_nodes(capture)
        self._settled = dict.fromkeys(unsafe, KEEP)
        for node, key in enumerate(self._keys):
            if key is not None:
                self._settled[node] = Treatment(recompute=key.recompute, offload=key.offload)

    def labelled(
        self, nodes: Sequence[int], slot: DeviceSlot, limits: StageLimits
    ) -> LabelledStage:
        return LabelledStage(
            self._costs, nodes, self._cuttable, self._settled, slot.kind,
            half=self._demands.half, grown=limits.grown,
        )  # fmt: skip

    def costs_of(self, stages: Sequence[Lightened]) -> CostTable:
        """The costs with the stages' regions, and those that are settled."""
        layers = [self._capture.layer_of[name] for name in self._capture.order]
        keys = list(self._keys)
        for stage in stages:
            for node, key in keys_of(layers, stage.runs).items():
                keys[node] = keys[node] or key
        return with_regions(self._costs, whole_groups(self._capture, keys))

    def _stages(self, partition: Partition) -> tuple[list[LabelledStage], list[StageLimits]]:
        stages = partition.stages
        position = {name: i for i, name in enumerate(self._capture.order)}
        nodes = [sorted(position[name] for name in stage.nodes) for stage in stages]
        limits = [self._limits(partition, index) for index in range(len(stages))]
        labelled = [
            self.labelled(inside, stage.device, limit)
            for inside, stage, limit in zip(nodes, stages, limits, strict=True)
        ]
        return labelled, limits

    def lightest(self, partition: Partition) -> CostTable:
        """The costs with the regions that give every stage of ``partition`` its least peak."""
        return self.costs_of(
            [
                lighten_stage(stage, self._choices, replace(limit, budget=0.0))
                for stage, limit in zip(*self._stages(partition), strict=True)
            ]
        )

    def improve(
        self, partition: Partition, choose: Callable[[CostTable, Mapping[str, str]], Partition]
    ) -> _Found:
        """``partition`` with the regions that its stages need."""
        stages = partition.stages
        pins = {name: stage.device.name for stage in stages for name in stage.nodes}
        labelled, limits = self._stages(partition)
        targets = [limit.budget for limit in limits]
        best: _Found | None = None
        for _ in range(_ROUNDS):
            treated = [
                lighten_stage(stage, self._choices, replace(limit, budget=target))
                for stage, limit, target in zip(labelled, limits, targets, strict=True)
            ]
            costs = self.costs_of(treated)
            again = choose(costs, pins)
            # The labels' sums are a little off: correct each limit by what the formula says.
            same = len(again.stages) == len(stages)
            errors = [0.0] * len(stages)
            if same:
                pairs = zip(again.stages, treated, strict=True)
                errors = [stage.memory.peak - label.peak for stage, label in pairs]
            corrected = [limit.budget - error for limit, error in zip(limits, errors, strict=True)]
            loosest = [
                replace(limit, budget=max(limit.budget, target, other))
                for limit, target, other in zip(limits, targets, corrected, strict=True)
            ]
            seconds = [label.seconds for label in treated]
            found = _Found(
                costs=costs,
                partition=again,
                treated=tuple(zip(labelled, loosest, seconds, strict=True)),
            )
            if best is None or _rank(found) < _rank(best):
                best = found
            if not same or not self._limited or corrected == targets:
                break
            targets = corrected
        assert best is not None
        return best

    def least(self, found: _Found) -> float:
        """What the stages of ``found`` cost at the least, however they are treated."""
        if len(found.partition.stages) != len(found.treated):
            return 0.0
        return sum(
            least_extra_seconds(stage, self._choices, limits, answer=seconds)
            for stage, limits, seconds in found.treated
            if seconds
        )

    def _limits(self, partition: Partition, index: int) -> StageLimits:
        stage = partition.stages[index]
        count = waiting_at(self._demands, len(partition.stages), index)
        memory = stage.memory
        slot = stage.device
        budget = float("inf") if self._limited else 0.0
        if slot.budget is not None:
            others = partition.peaks[slot.name] - memory.peak  # of its other stages, as they are
            budget = slot.budget - slot.reserve - others
        return StageLimits(
            static=memory.parameters + memory.buffers + memory.optimizer,
            budget=budget,
            held=count.most,
            grown=count.microbatches > 1,
        )
