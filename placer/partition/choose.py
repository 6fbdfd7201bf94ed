"""Chooses the device of every node: `choose_partition` finds the best stages, `rate_partition` given ones."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np

from placer.cost import CostTable
from placer.partition.arrange import candidate_cuts, device_chains, is_thinned, unit_pins
from placer.partition.candidate import (
    Candidate,
    StageCosts,
    rate_stages,
    reference_bytes,
    solve_order,
)
from placer.partition.describe import describe_partition
from placer.partition.model import (
    ModelUnits,
    least_peak,
    memory_problem,
    model_units,
    relaxed_chain,
    seconds_problem,
    shortest_step,
)
from placer.partition.noncontiguous import (
    GAIN,
    NoncontiguousChains,
    find_noncontiguous,
    is_better,
    may_be_noncontiguous,
)
from placer.partition.solver.problem import simple_bound
from placer.partition.solver.search import StageOf
from placer.partition.solver.solve import solve
from placer.partition.stage_cost.cache import TableCache
from placer.partition.stage_cost.tables import IntervalTables
from placer.partition.steps import StepClock, move_boundaries
from placer.partition.types import MANY_STAGES, DeviceSlot, Partition, PlanningOptions
from placer.partition.units import grouped_order, program_order, sampled_orders, unit_graph
from placer.program import Program

_SAMPLES = 4  # random orders to try if memory decides, because a stage's peak depends on its order
_SAMPLED_UNITS = 2_000  # units in all random orders together
_MOST_SAMPLED = 5_000  # units of a graph that random orders are tried for
# In orders so long that cuts are thinned, all cuts within so many units of a boundary are tried:
_NEARBY, _MOST_NEAR = 12, 200  # for each boundary, and for all together
_MOST_ROUNDS = 3  # times that stages are put into program order and the cuts are chosen again
_SLACK = 1.005  # factor by which bounds on peaks may exceed the least known peak
_NEAR = 0.8  # share of a budget from which on memory decides where cuts are
_STARTS = 8  # best candidates from which several stages per device are tried, to minimise memory
# To minimise a step: candidates whose step is laid out in time, and those of which boundaries are moved
_LAID_OUT, _MOVED = 16, 5


def choose_partition(
    program: Program,
    costs: CostTable,
    devices: Sequence[DeviceSlot],
    pins: Mapping[str, str],
    options: PlanningOptions,
    *,
    tables: TableCache | None = None,
    stop_at_share: float = 0.0,
) -> Partition:
    """The best chain of stages on ``devices``, with every unit on the device of its ``pins``.

    Every device gets a stage if there are enough nodes. Among placements within the budgets the objective
    decides; if there is none, the result has the least overflow, and ``fits`` is False.

    A stage's peak depends on the order in which it runs its nodes, and is computed exactly along one
    order. So for each of several orders, a dynamic program finds the best cuts
    (`placer.partition.candidate`). The orders tried are program order, one grouped by pins, and the orders
    of placements that `solve` finds among all orders: one of least time in which a lower bound on every
    peak is within its budget, and if memory decides, one in which the largest such bound is the least. If
    memory decides, some random orders are tried, too. `Partition.optimality` has a lower bound on all
    placements.

    Of more than `MANY_STAGES` stages, the best along program order are the result, and boundaries have no
    alternatives.

    ``tables`` is a cache that searches for one model share. With ``stop_at_share``, the search ends if the
    placement along program order fills no device beyond this share of its budget, including the reserve;
    no lower bound is stated then.
    """
    units = unit_graph(program)
    position = {name: i for i, name in enumerate(program.order)}
    layers = [program.nodes[name].layer for name in program.order]
    pin_of = unit_pins(units, {position[name]: pins[name] for name in pins}, layers)
    order = program_order(units)
    search = _Search(units, order, costs, devices, pin_of, options, tables or TableCache())
    search.try_order(order)
    found = search.best
    if stop_at_share and found is not None and found.fullest <= stop_at_share:
        return describe_partition(found, program, costs, search.pins_of(found), options, 0.0)
    if len(set(pin_of.values())) > 1:
        search.try_order(grouped_order(units, pin_of))
    best = search.best
    assert best is not None, "a chain that follows the pins is always feasible"
    model = model_units(units, order, costs, pin_of)
    if 1 < len(best.slots) <= MANY_STAGES and len(order) > len(best.slots):
        if not search.is_near(model):
            search.try_solutions(model)
            search.try_noncontiguous(model)
        assert search.best is not None
        best = search.best
        if options.objective == "throughput" and best.limit <= 1 and _is_chain(best):
            best = search.with_shortest_step()
        best = search.with_other_cuts(best)
    bound = search.lower_bound(model)
    return describe_partition(best, program, costs, search.pins_of(best), options, bound)


def rate_partition(
    program: Program,
    costs: CostTable,
    stages: Sequence[tuple[DeviceSlot, Sequence[str]]],
    options: PlanningOptions,
) -> Partition:
    """The partition with these ``stages``: pairs of a device and its nodes, in the order it runs them.

    No other placement is tried, so the lower bound is 0, and boundaries have no alternatives. Takes
    O(nodes * stages) time, much less than `choose_partition`.
    """
    position = {name: i for i, name in enumerate(program.order)}
    nodes = [position[name] for _, names in stages for name in names]
    cuts = list(itertools.accumulate((len(names) for _, names in stages), initial=0))
    slots = [slot for slot, _ in stages]
    pinned: list[str | None] = [slot.name for slot, names in stages for _ in names]
    tables = TableCache().build(costs, nodes, cuts, later=options.microbatches > 1)
    rated = rate_stages(StageCosts(tables, slots, pinned, options), nodes, range(len(cuts)))
    return describe_partition(rated, program, costs, pinned, options, 0.0)


class _Order:
    """A topological order of units, with their nodes and the pin of each node."""

    def __init__(self, units: Sequence[int], graph: nx.DiGraph, pin_of: Mapping[int, str]) -> None:
        self.units = list(units)
        members = dict(graph.nodes(data="nodes"))
        groups = [members[unit] for unit in units]
        self.nodes: list[int] = list(itertools.chain.from_iterable(groups))
        self.pinned = [
            pin_of.get(unit) for unit, group in zip(units, groups, strict=True) for _ in group
        ]
        # For each number of units, the position at which they end.
        self.ends = list(itertools.accumulate(map(len, groups), initial=0))

    def counts(self, found: Candidate) -> list[int]:
        """The number of units before each cut of ``found``, beginning with 0."""
        return [bisect.bisect_left(self.ends, found.tables.cuts[cut]) for cut in found.cuts]

    def cuts(self, tables: IntervalTables, counts: Collection[int]) -> list[int]:
        """The indices in ``tables`` of the cuts after these numbers of units."""
        return [tables.cuts.index(self.ends[count]) for count in counts]


class _Search:
    """Tries orders, and keeps the best candidate so far."""

    def __init__(
        self,
        units: nx.DiGraph,
        order: Sequence[int],
        costs: CostTable,
        devices: Sequence[DeviceSlot],
        pin_of: Mapping[int, str],
        options: PlanningOptions,
        tables: TableCache,
    ) -> None:
        self._units, self._costs, self._devices = units, costs, devices
        self._pin_of, self._options = pin_of, options
        self._cache = tables
        self._rank_of = {unit: i for i, unit in enumerate(order)}
        self._unit_of = {node: u for u, nodes in units.nodes(data="nodes") for node in nodes}
        self._chains: dict[tuple[str, ...], tuple[DeviceSlot, ...]] = {}
        self._tried: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.best: Candidate | None = None
        self._good: list[Candidate] = []  # the best ones, all different
        self.first: Candidate | None = None  # along program order
        self.coarse: Candidate | None = None  # the best one with thinned cuts

    def pins_of(self, candidate: Candidate) -> list[str | None]:
        """The pin of every node of the candidate, in its order."""
        return [self._pin_of.get(self._unit_of[node]) for node in candidate.nodes]

    def try_order(self, units: Sequence[int], counts: Collection[int] = ()) -> None:
        """Try the best stages along an order; cuts after ``counts`` units are always allowed.

        Costs are for stages that run their units in program order, because pending gradients depend on the
        order in which the readers of a value return its gradient. So the units of each stage are put into
        program order, and the cuts are chosen again.
        """
        found: Candidate | None = None
        for _ in range(_MOST_ROUNDS):
            order = self._along(units)
            cuts = self._cuts(order, counts)
            if (tried := (tuple(units), tuple(cuts))) in self._tried:
                return
            self._tried.add(tried)
            tables = self._build(order, cuts)
            if found is not None:  # the stages from which this order was made
                self._offer(self._rate(order, tables, found.slots, counts))
            found = self._solve(order, tables)
            if found is None:
                return
            reordered, counts = self._in_program_order(order, found)
            if reordered == order.units:
                self._offer(found)
                if is_thinned(units) and len(units) <= _MOST_SAMPLED:
                    if self.coarse is None or found.rank < self.coarse.rank:
                        self.coarse = found
                    self._try_nearby(order, found)
                return
            units = reordered

    def _try_nearby(self, order: _Order, found: Candidate) -> None:
        """Try all cuts near those of ``found``, which was chosen among thinned cuts.

        If memory decides, the thinned cuts are tried too, because a stage's peak may be much lower with a
        cut that is far away.
        """
        for _ in range(_MOST_ROUNDS):
            counts: Collection[int] = order.counts(found)
            far = max(1, min(_NEARBY, _MOST_NEAR // len(counts)))
            near = {count + d for count in counts for d in range(-far, far + 1)}
            if self._options.objective == "memory" or found.fullest > _NEAR:
                cuts = self._cuts(order, near)
            else:
                last = len(order.units)
                cuts = sorted({order.ends[min(max(count, 0), last)] for count in near})
            nearer = self._solve(order, self._build(order, cuts))
            if nearer is None:
                return
            reordered, counts = self._in_program_order(order, nearer)
            if reordered == order.units:
                self._offer(nearer)
                return
            order = self._along(reordered)
            tables = self._build(order, sorted({order.ends[count] for count in counts}))
            found = self._rate(order, tables, nearer.slots, counts)
            self._offer(found)

    def with_all_cuts(self, found: Candidate) -> Candidate:
        """``found`` with tables for all cuts of its order, or for the thinned ones and its own."""
        order = self._order_of(found)
        counts = order.counts(found)
        cuts = self._cuts(order, counts)
        if set(cuts).issubset(found.tables.cuts):
            return found
        tables = self._build(order, cuts)
        return replace(found, tables=tables, cuts=tuple(order.cuts(tables, counts)))

    def with_shortest_step(self) -> Candidate:
        """The candidate with the shortest step laid out in time, with boundaries moved from the best ones.

        Besides the good ones, those for even stages and for few transfers along the best order are tried.
        """
        best, options = self.best, self._options
        assert best is not None
        best = self.with_all_cuts(best)
        order = self._order_of(best)
        starts = list(self._good)
        for objective in ("bottleneck", "latency"):
            aim = replace(options, objective=objective)
            found = solve_order(StageCosts(best.tables, best.slots, order.pinned, aim), best.nodes)
            if found is not None and self._in_program_order(order, found)[0] == order.units:
                starts.append(found)
        starts = [c for c in starts if c.limit <= 1 and _is_chain(c)]
        timed = [(StepClock(c, self._costs, options)([c.cuts])[0], i) for i, c in enumerate(starts)]
        ends: list[tuple[float, int, Candidate]] = []
        for _, i in sorted(timed)[:_MOVED]:
            start = self.with_all_cuts(starts[i])
            order, clock = self._order_of(start), StepClock(start, self._costs, options)
            costs = StageCosts(start.tables, start.slots, order.pinned, options)
            cuts = move_boundaries(clock, start.cuts, costs.allowed(1.0))
            moved = rate_stages(costs, start.nodes, cuts)
            kept = moved if self._in_program_order(order, moved)[0] == order.units else start
            ends.append((clock([kept.cuts])[0], i, kept))
        return min(ends)[2] if ends else best

    def with_other_cuts(self, found: Candidate) -> Candidate:
        """``found`` with tables that include other cuts than its own, as alternatives for boundaries."""
        if len(found.tables.cuts) > len(set(found.cuts)):
            return found
        return self.with_all_cuts(found)

    def _along(self, units: Sequence[int]) -> _Order:
        return _Order(units, self._units, self._pin_of)

    def _order_of(self, found: Candidate) -> _Order:
        return self._along(list(dict.fromkeys(self._unit_of[node] for node in found.nodes)))

    def _cuts(self, order: _Order, counts: Collection[int]) -> list[int]:
        return candidate_cuts(self._units, order.units, self._costs, self._pin_of, counts)

    def _build(self, order: _Order, cuts: Sequence[int]) -> IntervalTables:
        later = self._options.microbatches > 1
        return self._cache.build(self._costs, order.nodes, cuts, later=later)

    def _rate(
        self,
        order: _Order,
        tables: IntervalTables,
        slots: Sequence[DeviceSlot],
        counts: Collection[int],
    ) -> Candidate:
        """The candidate whose stages end after ``counts`` units."""
        costs = StageCosts(tables, slots, order.pinned, self._options)
        return rate_stages(costs, order.nodes, order.cuts(tables, counts))

    def _solve(self, order: _Order, tables: IntervalTables) -> Candidate | None:
        """The best stages along ``order`` over all chains of devices; None if the pins rule out all."""
        best: Candidate | None = None
        for chain in device_chains(self._devices, order.pinned):
            self._chains.setdefault(tuple(slot.name for slot in chain), chain)
            costs = StageCosts(tables, chain, order.pinned, self._options)
            found = solve_order(costs, order.nodes)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
        return best

    def _offer(self, found: Candidate) -> None:
        repeated = len({slot.name for slot in found.slots}) < len(found.slots)
        full = all(x < y for x, y in itertools.pairwise(found.cuts))
        if repeated and full and may_be_noncontiguous(self._options, found.slots):
            # What all stages of a device need together, not each of them
            chains = NoncontiguousChains(found, self._costs, self.pins_of(found), self._options)
            found = chains.candidate(found.slots, found.cuts)
        self.first = self.first or found
        if self.best is None or found.rank < self.best.rank:
            self.best = found
        if all(found.stages != other.stages for other in self._good):
            self._good = sorted([*self._good, found], key=lambda c: c.rank)[:_LAID_OUT]

    def _in_program_order(self, order: _Order, found: Candidate) -> tuple[list[int], list[int]]:
        """The units with those of each stage in program order, and the number of units before each cut."""
        counts = order.counts(found)
        reordered: list[int] = []
        for begin, end in itertools.pairwise(counts):
            reordered += sorted(order.units[begin:end], key=self._rank_of.__getitem__)
        return reordered, counts

    def _try_sampled(self, model: ModelUnits) -> None:
        """Try some random orders."""
        count = len(model.order)
        if not 0 < count <= _MOST_SAMPLED:
            return
        samples = min(_SAMPLES, max(1, _SAMPLED_UNITS // count))
        for units in sampled_orders(self._units, samples):
            self.try_order(units)

    def is_near(self, model: ModelUnits) -> bool:
        """Is the best placement known to have almost the least peak, where the objective is memory?"""
        best = self.best
        assert best is not None
        if self._options.objective != "memory" or best.rank[0] > 1:
            return False
        return best.peak * (1 - GAIN) <= self.lower_bound(model)

    def try_solutions(self, model: ModelUnits) -> None:
        """Try the orders of placements that `solve` finds."""
        best, options = self.best, self._options
        assert best is not None
        over = best.rank[0] > 1
        if over or options.objective == "memory" or best.fullest > _NEAR:
            problem = memory_problem(model, self._costs, best.slots, options)
            self._try_solution(model, solve(problem))
            self._try_sampled(model)
        if not over:
            best = self.best or best
            most = _most_bytes(best, options)
            problem = seconds_problem(model, self._costs, best.slots, options, most)
            self._try_solution(model, solve(problem))

    def lower_bound(self, model: ModelUnits) -> float:
        """A lower bound on the value that is minimised: the largest unit, or an even share of all of them.

        Values that cross boundaries do not count, nor does what the order of operations adds to a peak. If
        more than one chain of devices was tried, every device is as good as the best one.
        """
        assert self.best is not None
        chains, options = list(self._chains.values()), self._options
        chain = chains[0] if len(chains) == 1 else relaxed_chain(chains)
        if options.objective == "memory" or self.best.rank[0] > 1:  # nothing fits, so peaks decide
            return least_peak(model, self._costs, chain, self._devices, options)
        problem = seconds_problem(model, self._costs, chain, options, [None] * len(chain))
        if options.objective == "latency":
            return float(np.min([slot.seconds for slot in problem.slots], axis=0).sum())
        if options.objective == "throughput":
            return shortest_step(problem, chain, options)
        return simple_bound(problem)

    def _try_solution(self, model: ModelUnits, solution: StageOf | None) -> None:
        """Try the order in which every stage of ``solution`` has its units in program order."""
        if solution is None:
            return
        stage_of = solution[:-1]  # without the loss
        order = np.argsort(stage_of, kind="stable")
        self.try_order([model.order[i] for i in order], np.cumsum(np.bincount(stage_of)).tolist())

    def try_noncontiguous(self, model: ModelUnits) -> None:
        """Try several stages per device, if memory decides and the best peak is not close to the bound."""
        best = self.best
        assert best is not None
        if best.rank[0] <= 1 and (self._options.objective != "memory" or self.is_near(model)):
            return
        # Along program order, in which stages run as recorded, and along the best orders.
        good = self._good[:_STARTS] if best.rank[0] <= 1 else []
        known = (best, self.first, self.coarse, *good)
        starts = {c.stages: c for c in known if c is not None}
        for start in starts.values():
            found = self._noncontiguous(self.with_all_cuts(start))
            if found is not None and is_better(found, best):
                self._offer(found)

    def _noncontiguous(self, start: Candidate) -> Candidate | None:
        found = find_noncontiguous(start, self._costs, self.pins_of(start), self._options)
        if found is None:
            return None
        reordered, counts = self._in_program_order(self._order_of(found), found)
        order = self._along(reordered)
        if order.nodes == list(found.nodes):
            return found
        tables = self._build(order, self._cuts(order, counts))
        start = replace(start, tables=tables, nodes=tuple(order.nodes))
        chains = NoncontiguousChains(start, self._costs, order.pinned, self._options)
        return chains.candidate(found.slots, order.cuts(tables, counts))


def _is_chain(candidate: Candidate) -> bool:
    """Does every device have exactly one stage?"""
    names = {slot.name for slot in candidate.slots}
    full = all(x < y for x, y in itertools.pairwise(candidate.cuts))
    return full and len(names) == len(candidate.slots)


def _most_bytes(best: Candidate, options: PlanningOptions) -> list[float | None]:
    """The most bytes of every stage: its budget, and to minimise memory not much more than ``best`` has."""
    near = best.peak * _SLACK if options.objective == "memory" else np.inf
    found: list[float | None] = []
    for slot in best.slots:
        most = near * (slot.budget or reference_bytes(best.slots))
        if slot.budget is not None:
            most = min(most, slot.budget) - slot.withheld
        found.append(most if np.isfinite(most) else None)
    return found
