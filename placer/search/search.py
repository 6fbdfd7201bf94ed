"""Finds the best strategy that fits: bounds prune, estimates rank, and dry runs decide.

An estimate is a plan that got no dry run. For more than `MANY_STAGES` devices, where plans take long, it is
if possible a sum over stages along program order (`Bounds.along_program_order`), and only the best one is
planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from placer.cost import batch_rows
from placer.errors import PlacerError, SpecError
from placer.partition import MANY_STAGES
from placer.plan.step_spans import step_spans
from placer.plan.types import Plan
from placer.planner.devices import links_of, with_known_memory
from placer.quantities import format_count
from placer.search.bounds import SPARE, Bound, Bounds
from placer.search.candidates import list_strategies
from placer.search.strategy import SEARCHED, STATES, Family, Pool, Strategy
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec
from placer.timeline import end_of

AS_GOOD = 1.01  # a value that is larger by less than this factor is as good
# By which a strategy that saves memory, or cuts space, must be better to be estimated
_WORTH_IT = 1.05
_ROUNDS = 4  # of estimates: each takes the best of every family that may still win
_MOST_JUDGED = 6  # plans that get a dry run, and again as many where none of them fits
_MOST_ACTIONS = 20_000  # forward passes of all stages in a step that takes not too long to plan
_MOST_TRIED = 1_000  # strategies of a family that are estimated along program order
_FAR = 1.15  # an estimate above so many times the room does not become a plan that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """A strategy with what is known of it: its bound, an estimate, or a plan that was judged.

    ``plan`` is None if none was made; ``spec`` gives it again. Without a plan ``bound`` is an estimate along
    program order if it ``fits``. ``judged``: a dry run decided whether it fits. ``worst_time`` is
    `Plan.rank_time` on the same machine at its worst: collectives between nodes use one network card of each.
    """

    strategy: Strategy
    bound: Bound
    spec: PlacementSpec
    fits: bool = False
    plan: Plan | None = None
    judged: bool = False
    worst_time: float = 0.0

    @property
    def peak(self) -> int:
        """The most bytes of a device, or a lower bound on them without a plan."""
        return int(self.bound.nbytes) if self.plan is None else self.plan.peak

    @property
    def is_near(self) -> bool:
        """Whether it fits or nearly so, as far as is known."""
        return self.plan is None or all(
            device.room is None or device.peak <= _FAR * device.room for device in self.plan.devices
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a search: ``best`` is None if nothing fits, and ``nearest`` then overflows the least.

    ``others`` are the best of every other family, those that fit first. ``unfit`` has, for families of which
    even the bound exceeds every device, the member of the fewest bytes.
    """

    best: Rated | None
    nearest: Rated | None
    others: tuple[Rated, ...]
    unfit: tuple[Rated, ...]


def find_strategy(
    wanted: PlacementSpec, make: JudgingPlanner, *, any_will_do: bool = False
) -> Found:
    """The best strategy for a step of the model of ``make``, on any of the devices of ``wanted``.

    Fields that ``wanted`` gives stay as they are, all others are chosen. Among strategies that fit, the
    objective decides, and the simplest of those that are as good. By time, every strategy is rated on the
    machine and on the same at its worst, and the one with the least largest loss wins.

    Where the least that every strategy can need is too much, the smallest is planned nevertheless, to say by
    how much it misses (`Found.nearest`). If ``any_will_do`` it is not, and the first strategy that fits in a
    dry run, the fastest by its estimate, is the best.

    Deterministic: neither a clock nor a random number decides. Raises ``SpecError`` if the memory of a device
    is not known, and ``CaptureError`` if the model does not run.
    """
    wanted = with_known_memory(wanted, "which strategies fit")
    return _Search(wanted, make, any_will_do=any_will_do).run()


class _Search:
    def __init__(self, wanted: PlacementSpec, make: JudgingPlanner, *, any_will_do: bool) -> None:
        self._wanted, self._make, self._any_will_do = wanted, make, any_will_do
        self._links, self._pool = links_of(wanted), Pool(wanted.devices)
        self._bounds = Bounds(
            make.program,
            make.inputs,
            wanted,
            make.costs,
            make.loss_of(wanted),
            processes=make.processes,
        )
        self._left: dict[Family, list[tuple[Strategy, Bound]]] = {}  # not yet tried, the best first
        # Bytes of an estimate over its bound, where it was too large, for all of the batch on one device
        self._excess: dict[Family, float] = {}
        # The share that estimates along program order may fill
        self._room: dict[Family, float] = {}
        self._listed: set[Strategy] = set()  # those that may fit by their bounds
        self._too_large: set[Strategy] = set()  # by their bounds
        # As if with one micro-batch: more of them would need as much memory as what did not fit
        self._exhausted: set[Strategy] = set()
        self._rated: dict[Strategy, Rated] = {}
        self._failure: PlacerError | None = None  # of the last one that could not be planned

    def run(self) -> Found:
        unfit = self._list_families()
        if not self._left and not unfit:
            raise self._no_strategy()
        listed = {family: list(members) for family, members in self._left.items()}
        many = len(self._wanted.devices) > MANY_STAGES
        self._estimate_families(many=many)
        smallest = [] if self._any_will_do or self._rated else [*unfit, *self._smallest()]
        for rated in sorted(smallest, key=lambda rated: rated.bound.nbytes)[:1]:
            self._estimate(rated.strategy, rated.bound)
        if not self._rated and self._failure is not None:
            raise self._failure  # it is not a matter of memory
        expected = self._least()
        best = self._choose(self._judge_best() if many else self._judge())
        known = 0
        while not many and known < len(self._rated) and self._is_worse(best, expected):
            # What was judged needs more than its estimate, so more ways of saving memory may help, and what
            # was worse than the estimate may be better.
            known = len(self._rated)
            self._left = {
                family: [pair for pair in members if pair[0] not in self._rated]
                for family, members in listed.items()
            }
            self._estimate_families(many=False)
            expected = self._least()
            best = self._choose(self._judge())
        others = list(self._best_of_families(best))
        tried = [rated for rated in self._rated.values() if rated.plan is not None]
        nearest = min(
            tried,
            key=lambda r: (not r.judged, r.plan.overflow_bytes if r.plan else 0, self._key(r)),
            default=None,
        )
        return Found(
            best=best,
            nearest=None if best is not None else nearest,
            others=tuple(others),
            unfit=tuple(r for r in unfit if r.strategy not in self._rated),
        )

    def _list_families(self) -> list[Rated]:
        """Fill in the strategies that may fit by their bounds. Returns the smallest of all other families."""
        smallest: dict[Family, tuple[Strategy, float]] = {}
        pinned = bool(self._wanted.layers)
        for strategy in list_strategies(
            self._make.program,
            self._wanted,
            self._wanted.devices,
            batch_rows(self._make.program, self._make.inputs) or 1,
            processes=self._make.processes,
        ):
            if not self._pool.has_rows(strategy.replicas, strategy.stages * strategy.shards):
                continue
            if pinned and strategy.spec(self._wanted, self._pool) is None:
                continue
            nbytes, _ = self._bounds.nbytes(strategy)
            if nbytes <= self._bounds.room:
                pair = strategy, self._bounds(strategy)
                self._left.setdefault(strategy.family, []).append(pair)
                self._listed.add(strategy)
                continue
            self._too_large.add(strategy)
            _, least = smallest.setdefault(strategy.family, (strategy, nbytes))
            if nbytes < least:
                smallest[strategy.family] = strategy, nbytes
        for members in self._left.values():
            members.sort(key=lambda pair: self._values(pair[0], pair[1].seconds, pair[1].nbytes))
        return [
            Rated(strategy=strategy, bound=self._bounds(strategy), spec=spec)
            for family, (strategy, _) in smallest.items()
            if family not in self._left and (spec := strategy.spec(self._wanted, self._pool))
        ]

    def _estimate_families(self, *, many: bool) -> None:
        for number in range(_ROUNDS):
            for family in sorted(self._left, key=_costs):
                if not many or family.shards or family.chunks or family.offload:
                    self._estimate_next(family)
                elif not number:
                    self._estimate_along_program_order(family)
                if self._any_will_do and not many and self._one_is_known_to_fit():
                    return

    def _one_is_known_to_fit(self) -> bool:
        """Whether a strategy fits in a dry run. If one does by its estimate alone, it gets one."""
        if any(rated.fits and not rated.judged for rated in self._rated.values()):
            self._judge()
        return any(rated.fits and rated.judged for rated in self._rated.values())

    def _values(self, strategy: Strategy, seconds: float, nbytes: float) -> tuple[float, ...]:
        """What the objective minimises, then what decides among equals."""
        first = {"memory": (nbytes, seconds), "devices": (strategy.devices, seconds)}
        return *first.get(self._wanted.objective, (seconds,)), *strategy.complexity

    def _key(self, rated: Rated) -> tuple[float, ...]:
        seconds = rated.bound.seconds if rated.plan is None else rated.plan.rank_time
        return self._values(rated.strategy, seconds, rated.peak)

    def _least(self) -> float | None:
        """The least that the objective is known to be, of all that fit; None if nothing does."""
        fitting = (self._key(rated)[0] for rated in self._rated.values() if rated.fits)
        return min(fitting, default=None)

    def _is_worse(self, best: Rated | None, expected: float | None) -> bool:
        """Is ``best``, as it was judged, worse than the ``expected`` by estimates?"""
        return best is None or (
            not self._any_will_do
            and expected is not None
            and self._key(best)[0] > expected * _WORTH_IT
        )

    def _estimate_next(self, family: Family) -> None:
        """Estimate the next member of ``family`` that may fit, and be better than all that fit so far.

        A family that is simple is estimated once even if it cannot be better, to be told as an alternative.
        """
        least = self._least()
        known = any(strategy.family == family for strategy in self._rated)
        members = self._left[family]
        for strategy, bound in list(members):
            value = self._values(strategy, bound.seconds, bound.nbytes)[0]
            costly = _costs(family) > 0
            margin = _WORTH_IT if costly else AS_GOOD
            if least is not None and value * margin >= least and (known or costly):
                members.clear()  # all others are worse
                return
            if not self._needs_help(strategy) or self._may_be_replicas(strategy):
                continue
            members.remove((strategy, bound))
            if strategy.stages > MANY_STAGES:  # it would take too long
                continue
            if _without_microbatches(strategy) in self._exhausted:
                continue
            excess = self._excess.get(family, 0.0) * _share(strategy)
            if bound.nbytes + excess > _FAR * self._bounds.room:
                continue
            if self._estimate(strategy, bound):
                return

    def _needs_help(self, strategy: Strategy) -> bool:
        """Whether the same with one way of saving memory less, if it has any, is known not to fit."""
        return all(
            less in self._too_large or (less in self._rated and not self._rated[less].fits)
            for less in strategy.with_less_help()
        )

    def _may_be_replicas(self, strategy: Strategy) -> bool:
        """Whether replicas in the place of shards may fit, and divide the work as evenly.

        Then the step takes no longer: there are the same gradients to sum, and no pieces to exchange.
        """
        by_time = self._wanted.objective not in ("memory", "devices")
        if strategy.shards == 1 or not by_time or not self._make.processes:
            return False
        others = replace(strategy, replicas=strategy.replicas * strategy.shards, shards=1)
        if others not in self._listed:
            return False
        is_even = self._bounds.rows_of(others) * strategy.shards <= self._bounds.rows_of(strategy)
        return is_even and (others not in self._rated or self._rated[others].fits)

    def _estimate(self, strategy: Strategy, bound: Bound) -> bool:
        """Estimate a strategy; False if the model cannot be placed so."""
        spec = strategy.spec(self._wanted, self._pool)
        plan = None if spec is None else self._plan(self._make.rough_estimate, spec)
        if spec is None or plan is None:
            return False
        rated = self._rate(Rated(strategy=strategy, bound=bound, spec=spec), plan)
        if not plan.fits:
            self._excess[strategy.family] = (rated.peak - bound.nbytes) / _share(strategy)
        if self._needs_what_did_not_fit(rated):
            self._exhausted.add(_without_microbatches(strategy))
        self._rated.setdefault(rated.strategy, rated)
        return True

    def _estimate_along_program_order(self, family: Family) -> None:
        """Estimate the members of ``family`` in the order of their bounds, and keep the best that fits."""
        best: tuple[Strategy, Bound] | None = None
        for strategy, bound in self._left[family][:_MOST_TRIED]:
            if best is not None and bound.seconds >= best[1].seconds:
                break  # all others are worse
            if strategy.stages * strategy.microbatches > _MOST_ACTIONS:
                continue
            # Gradients are divided to save memory only, because code that reads them gets pieces.
            less = replace(strategy, shard_state="optimizer")
            if strategy.shard_state == "gradients" and less not in self._too_large:
                continue
            found = self._bounds.along_program_order(strategy, self._room.get(family, 1.0))
            if found is None:
                self._too_large.add(strategy)
            elif best is None or found.seconds < best[1].seconds:
                best = strategy, found
        if best is None:
            return
        strategy, bound = best
        simpler = (self._rated.get(each) for each in strategy.with_less_help())
        if any(rated is not None and rated.bound.seconds <= bound.seconds for rated in simpler):
            return  # it helps nothing
        if (spec := strategy.spec(self._wanted, self._pool)) is not None:
            layout = {"node_layout": bound.node_layout}
            self._rated[strategy] = Rated(
                strategy=strategy,
                bound=bound,
                spec=spec.model_copy(update=layout),
                fits=True,
                worst_time=bound.worst_seconds,
            )

    def _smallest(self) -> Iterator[Rated]:
        """Of each family the member with the least bound on its bytes."""
        for members in filter(None, self._left.values()):
            strategy, bound = min(members, key=lambda pair: pair[1].nbytes)
            if (spec := strategy.spec(self._wanted, self._pool)) is not None:
                yield Rated(strategy=strategy, bound=bound, spec=spec)

    def _rate(self, rated: Rated, plan: Plan, *, judged: bool = False) -> Rated:
        """``rated`` with ``plan``, its time at worst, and the strategy that the plan has."""
        strategy = rated.strategy
        without = replace(strategy, recompute=False)
        if strategy.recompute and not plan.checkpoint and not self._was_refuted(without):
            strategy = without  # there was no need
        if plan.grid.devices < strategy.stages:  # no more pieces, or fewer are faster
            strategy = replace(strategy, stages=plan.grid.devices)
            if self._wanted.stages == "auto":
                spec = strategy.spec(self._wanted, self._pool) or rated.spec
                rated = replace(rated, spec=spec)
        rated = replace(rated, strategy=strategy)
        worst = plan.rank_time
        if self._links.network is not None and plan.processes and plan.step_seconds is not None:
            # Replicas share nothing but sums, so one of them takes as long as all.
            links, stride = self._links.at_worst(), plan.grid.stride
            pieces, shares = plan.state_layout.gradients, plan.state_layout.optimizer
            trained = [stage.memory.gradients * pieces for stage in plan.stages]
            slower = [
                replace(
                    stage,
                    sum_seconds=links.reduce_seconds(
                        nbytes,
                        ranks=plan.replicas * plan.shards,
                        stride=stride,
                        pieces=pieces,
                        rounds=plan.microbatches,
                    ),
                )
                for stage, nbytes in zip(plan.stages, trained, strict=True)
            ]
            gathered = [
                each.gather_seconds(max(trained), ranks=shares, stride=stride)
                for each in (links, self._links)
            ]
            alone = replace(
                plan,
                stages=tuple(slower),
                replicas=1,
                shard_over=plan.shard_over or plan.replicas,
                optimizer_seconds=(plan.optimizer_seconds or 0.0) + gathered[0] - gathered[1],
            )
            worst = end_of(step_spans(alone))
        return replace(rated, plan=plan, fits=plan.fits, judged=judged, worst_time=worst)

    def _needs_what_did_not_fit(self, rated: Rated) -> bool:
        """Did the same with another number of micro-batches need no more, and not fit in a dry run?"""
        alike = _without_microbatches(rated.strategy)
        return any(
            known.judged and not known.fits and known.peak <= rated.peak * (1 + 1e-3)
            for strategy, known in self._rated.items()
            if _without_microbatches(strategy) == alike
        )

    def _was_refuted(self, strategy: Strategy) -> bool:
        """Did a dry run show that ``strategy`` does not fit?"""
        rated = self._rated.get(strategy)
        return rated is not None and rated.judged and not rated.fits

    def _plan(self, make: Callable[[PlacementSpec], Plan], spec: PlacementSpec) -> Plan | None:
        """The result of ``make(spec)``; None if the model cannot be placed so."""
        try:
            return make(spec)
        except PlacerError as error:
            self._failure = error
            return None

    def _no_strategy(self) -> SpecError:
        """The error for fields that contradict each other, the devices or the batch."""
        given = sorted({*SEARCHED, "shard_over"} & self._wanted.model_fields_set)
        fields = ", ".join(f'"{name}"' for name in given)
        devices = format_count(len(self._wanted.devices), "device")
        problem = (
            f"nothing has what is given ({fields}), with {devices} and the rows of the example"
        )
        return SpecError(
            SpecError.UNNAMED,
            [(f"/{given[0] if given else 'devices'}", problem, "leave some of it out")],
        )

    def _judge(self) -> list[Rated]:
        """Judge what nearly fits by its estimate, the best first, until the next one cannot be chosen.

        That is one which is worse than a judged one, or as good as a simpler one. Of those that are as good
        as the best, the simplest comes first.
        """
        judged = {strategy: rated for strategy, rated in self._rated.items() if rated.judged}
        before = 0 if self._any_will_do else len(judged)
        for column in range(2 if self._links.network is not None else 1):
            near = [rated for rated in self._rated.values() if rated.is_near]
            values = {r.strategy: self._values_of([r])[0][column] for r in near}
            as_good = min(values.values(), default=0.0) * AS_GOOD
            near.sort(key=lambda r: (max(values[r.strategy], as_good), r.strategy.complexity))
            for rated in near:
                if rated.strategy in judged or len(judged) - before >= _MOST_JUDGED * (column + 1):
                    continue
                if self._needs_what_did_not_fit(rated):
                    continue
                value = values[rated.strategy]
                good = [r for r in judged.values() if r.plan and r.fits and not r.plan.starved]
                if good and self._any_will_do:
                    return list(judged.values())
                known = {r.strategy.complexity: self._values_of([r])[0][column] for r in good}
                if any(value > least * AS_GOOD for least in known.values()):
                    break
                if any(
                    parts <= rated.strategy.complexity and least <= value * AS_GOOD
                    for parts, least in known.items()
                ):
                    continue
                make = self._make.quick_plan if self._any_will_do else self._make
                plan = self._plan(make, rated.spec)
                if plan is not None:
                    found = self._rate(self._rated.pop(rated.strategy), plan, judged=True)
                    judged[rated.strategy] = self._rated[rated.strategy] = found
        return list(judged.values())

    def _judge_best(self) -> list[Rated]:
        """Plan the strategies in the order of their losses, and judge the best plan, until one fits.

        Each plan has one dry run, without corrections, which would be as many again. Where one does not fit,
        its family is estimated again with as much less room as was missing.
        """
        tried: dict[Strategy, Rated] = {}
        for _ in range(2 * _MOST_JUDGED):
            near = [r for r in self._rated.values() if r.is_near and r.strategy not in tried]
            if not near:
                break
            _, rated = self._by_loss(near)[0]
            is_planned = rated.plan is not None
            if rated.plan is not None:
                plan: Plan | None = self._make.judge(rated.plan)
            else:
                plan = self._plan(partial(self._make.estimate, spare=SPARE), rated.spec)
            if plan is None:
                del self._rated[rated.strategy]
                continue
            found = self._rate(rated, plan, judged=is_planned)
            found = self._rated[rated.strategy] = replace(found, strategy=rated.strategy)
            if found.is_near and not is_planned:
                continue  # it is judged if it still is the best
            tried[rated.strategy] = found
            if found.fits:
                break
            family = rated.strategy.family
            self._room[family] = self._room.get(family, 1.0) * self._bounds.room / found.peak
            left = [pair for pair in self._left[family] if pair[0] not in tried]
            self._left[family] = left
            self._estimate_along_program_order(family)
        return [found for found in tried.values() if found.judged]

    def _values_of(self, rated: Sequence[Rated]) -> list[tuple[float, float]]:
        """What the objective minimises, on the machine and on the same at its worst."""
        found = []
        for each in rated:
            value = self._key(each)[0]
            by_time = self._wanted.objective not in ("memory", "devices")
            found.append((value, each.worst_time if by_time else value))
        return found

    def _choose(self, judged: Sequence[Rated]) -> Rated | None:
        """The one with the least largest loss, and the simplest of those that are as good.

        One that starves no kernel of its workspace is better than one that does.
        """
        fitting = [rated for rated in judged if rated.fits]
        good = [rated for rated in fitting if rated.plan is not None and not rated.plan.starved]
        found = self._by_loss(good or fitting)
        equal = [rated for loss, rated in found if loss <= found[0][0] * AS_GOOD]
        return min(
            equal, key=lambda rated: (rated.strategy.complexity, self._key(rated)), default=None
        )

    def _by_loss(self, rated: Sequence[Rated]) -> list[tuple[float, Rated]]:
        """``rated`` by how many times the best value each has, on the machine or on the same at its worst."""
        values = self._values_of(rated)
        least = [min(column) or 1.0 for column in zip(*values, strict=True)]
        losses = [max(v / b for v, b in zip(value, least, strict=True)) for value in values]
        found = zip(losses, rated, strict=True)
        return sorted(found, key=lambda pair: (pair[0], pair[1].strategy.complexity))

    def _best_of_families(self, best: Rated | None) -> Iterator[Rated]:
        """The best of every family but that of ``best``; those that fit come first."""
        found: dict[Family, Rated] = {}
        for rated in sorted(self._rated.values(), key=lambda r: (not r.fits, self._key(r))):
            if best is None or rated.strategy.family != best.strategy.family:
                found.setdefault(rated.strategy.family, rated)
        yield from found.values()


def _without_microbatches(strategy: Strategy) -> Strategy:
    return replace(strategy, microbatches=1)


def _share(strategy: Strategy) -> float:
    """The share of the activations of a step that a device has for one micro-batch, about."""
    return 1 / (strategy.devices * strategy.microbatches)


def _costs(family: Family) -> int:
    """How much more a strategy of ``family`` costs to estimate: other programs, and searches in stages."""
    helped = family.recompute + family.offload + family.chunks
    return 2 * family.shards + helped + STATES.index(family.shard_state)
