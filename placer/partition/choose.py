"""Choose which nodes run on which device: pinned layers kept, the rest where it serves best."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from placer.capture import Capture
from placer.cost import CostTable
from placer.partition.arrange import candidate_cuts, device_chains, is_thinned, unit_pins
from placer.partition.bound import least_peak
from placer.partition.candidate import Candidate, rate_stages, reference_bytes, solve_order
from placer.partition.describe import describe_partition
from placer.partition.model import (
    ModelUnits,
    memory_problem,
    model_units,
    relaxed_chain,
    seconds_problem,
)
from placer.partition.noncontiguous import (
    GAIN,
    NoncontiguousChains,
    find_noncontiguous,
    is_better,
)
from placer.partition.solver.problem import Solution
from placer.partition.solver.solve import lower_bound, solve
from placer.partition.stage_cost.cache import TableCache
from placer.partition.stage_cost.tables import IntervalTables
from placer.partition.types import DeviceSlot, Partition, PlanningOptions
from placer.partition.units import grouped_order, program_order, sampled_orders, unit_graph

_MOST_ALIVE = 5_000  # of partly decided downsets in a proof: planning stays within a second or so
_SAMPLES = 4  # orders that are drawn where memory decides: a stage's peak depends on its order
_SAMPLED_UNITS, _MOST_SAMPLED = 2_000, 5_000  # in all of them; a graph of more has none
# Units before and after a boundary where all are tried, in orders of so many that boundaries are thinned:
_NEARBY, _MOST_NEAR = 12, 200  # for each of them, and in all
_MOST_RESTATED = 3  # times that an order's stages are put into program order and looked for again
_SLACK = 1.005  # how far above the least peak the additive bounds of a proposal may go
_NEAR = 0.8  # share of a budget from which on memory decides where cuts are


def choose_partition(
    capture: Capture,
    costs: CostTable,
    devices: Sequence[DeviceSlot],
    pins: Mapping[str, str],
    options: PlanningOptions,
    *,
    tables: TableCache | None = None,
    enough: float = 0.0,
) -> Partition:
    """The best chain of stages on ``devices`` that keeps every node of ``pins`` on its device.

    Every device gets a stage as long as there are nodes to go round. Among placements within the
    budgets the objective decides; when there is none, the answer has the least overflow and
    ``fits`` is False.

    Peaks depend on the order in which a stage runs its nodes and are exact along one order, so the
    dynamic program over cuts (`candidate`) has the last word. It is given the program's order, one
    grouped by pins, and those of the placements that `solve` finds over all orders, by time (with a
    lower bound on peaks under the budgets) and by that bound. Where memory decides it is given some
    drawn orders too, and the stages found along these, each with its units in program order.
    `Partition.optimality` says how far the answer can be from the best of all placements.

    ``tables`` are shared by searches for one model. The search ends with the first placement that
    fills no device beyond ``enough`` of its budget, the reserve counted; then nothing is known of how
    good it is.
    """
    units = unit_graph(capture)
    position = {name: i for i, name in enumerate(capture.order)}
    pin_of = unit_pins(units, {position[name]: device for name, device in pins.items()})
    search = _Search(units, costs, devices, pin_of, options, tables or TableCache())
    program = program_order(units)
    search.add(program)
    found = search.best
    if enough and found is not None and found.fullest <= enough:
        return describe_partition(found, capture, costs, search.pinned_nodes(found), options, 0.0)
    if len(set(pin_of.values())) > 1:
        search.add(grouped_order(units, pin_of))
    best = search.best
    assert best is not None, "a chain that follows the pins is always feasible"
    model = model_units(units, program, costs, pin_of)
    bound = 0.0
    if len(best.slots) > 1 and len(program) > len(best.slots):
        bound = search.add_solved(model)
        search.add_returning(bound)
        assert search.best is not None
        best = search.with_all_boundaries(search.best)
    return describe_partition(best, capture, costs, search.pinned_nodes(best), options, bound)


def rate_partition(
    capture: Capture,
    costs: CostTable,
    stages: Sequence[tuple[DeviceSlot, Sequence[str]]],
    options: PlanningOptions,
) -> Partition:
    """These stages, each a device with its nodes in the order it runs them, and what they cost.

    No other placement is looked for, so its optimality is not known (the bound is 0), and of its
    boundaries not where else they could be. O(nodes x stages), much less than `choose_partition`.
    """
    position = {name: i for i, name in enumerate(capture.order)}
    nodes = [position[name] for _, names in stages for name in names]
    cuts = list(itertools.accumulate((len(names) for _, names in stages), initial=0))
    slots = [slot for slot, _ in stages]
    pinned: list[str | None] = [slot.name for slot, names in stages for _ in names]
    tables = _build(TableCache(), costs, nodes, cuts, options)
    rated = rate_stages(tables, nodes, slots, range(len(cuts)), pinned, options)
    return describe_partition(rated, capture, costs, pinned, options, 0.0)


def _build(
    cache: TableCache,
    costs: CostTable,
    nodes: Sequence[int],
    cuts: Sequence[int],
    options: PlanningOptions,
) -> IntervalTables:
    return cache.build(costs, nodes, cuts, later=options.microbatches > 1)


class _Search:
    """The best candidate of the orders that were tried so far."""

    def __init__(
        self,
        units: nx.DiGraph,
        costs: CostTable,
        devices: Sequence[DeviceSlot],
        pin_of: Mapping[int, str],
        options: PlanningOptions,
        tables: TableCache,
    ) -> None:
        self._units, self._costs, self._devices = units, costs, devices
        self._pin_of, self._options = pin_of, options
        self._cache = tables
        self._place = {unit: i for i, unit in enumerate(program_order(units))}
        self._chains: dict[tuple[str, ...], tuple[DeviceSlot, ...]] = {}
        self._tried: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.best: Candidate | None = None
        self.first: Candidate | None = None  # along program order
        self.coarse: Candidate | None = None  # the best with thinned boundaries

    def pinned_nodes(self, candidate: Candidate) -> list[str | None]:
        """The pin of every node of the candidate, in its order."""
        pin_of_node = {
            node: self._pin_of.get(unit)
            for unit, nodes in self._units.nodes(data="nodes")
            for node in nodes
        }
        return [pin_of_node[node] for node in candidate.nodes]

    def add(self, order: Sequence[int], kept: Collection[int] = ()) -> Candidate | None:
        """Try the best stages along ``order`` (of units); a stage may end after ``kept`` units.

        Costs are recorded in program order: in which order the readers of a value hand over their
        gradients decides what waits meanwhile. So a stage runs its units in program order, and
        stages that have them in another one are a proposal, which is restated and tried again.
        The stages along the last order tried; None where none is new, or the pins forbid it.
        """
        found: Candidate | None = None
        for _ in range(_MOST_RESTATED):
            cuts = candidate_cuts(self._units, order, self._costs, self._pin_of, kept)
            if (tried := (tuple(order), tuple(cuts))) in self._tried:
                break
            self._tried.add(tried)
            nodes, pinned = self._nodes(order)
            tables = _build(self._cache, self._costs, nodes, cuts, self._options)
            if found is not None:  # the very stages that the order was made of
                same = self._indices(tables, order, kept)
                slots, options = found.slots, self._options
                self._offer(rate_stages(tables, nodes, slots, same, pinned, options))
            found = self._solve(tables, nodes, pinned)
            if found is None:
                break
            restated, kept = self._in_program_order(order, found)
            if restated == list(order):
                self._offer(found)
                if is_thinned(order) and len(order) <= _MOST_SAMPLED:
                    if self.coarse is None or found.rank < self.coarse.rank:
                        self.coarse = found
                    self._add_near(order, found)
                break
            order = restated
        return found

    def _add_near(self, order: Sequence[int], found: Candidate) -> None:
        """Try all boundaries near those of ``found``, which is of a thinned choice along ``order``."""
        for _ in range(_MOST_RESTATED):
            _, counts = self._in_program_order(order, found)
            far = max(1, min(_NEARBY, _MOST_NEAR // len(counts)))
            near = {count + d for count in counts for d in range(-far, far + 1)}
            nodes, pinned = self._nodes(order)
            nearer = self._solve(self._tables(order, nodes, near), nodes, pinned)
            if nearer is None:
                return
            restated, counts = self._in_program_order(order, nearer)
            if restated == list(order):
                self._offer(nearer)
                return
            order = restated
            nodes, pinned = self._nodes(order)
            tables = self._tables_of(order, nodes, counts)
            same = self._indices(tables, order, counts)
            found = rate_stages(tables, nodes, nearer.slots, same, pinned, self._options)
            self._offer(found)

    def _tables(
        self, order: Sequence[int], nodes: Sequence[int], kept: Collection[int]
    ) -> IntervalTables:
        cuts = candidate_cuts(self._units, order, self._costs, self._pin_of, kept)
        return _build(self._cache, self._costs, nodes, cuts, self._options)

    def _tables_of(
        self, order: Sequence[int], nodes: Sequence[int], counts: Collection[int]
    ) -> IntervalTables:
        """The tables for the stages that end after so many units, and no others."""
        ends = sorted(set(self._boundaries(order, counts)))
        return _build(self._cache, self._costs, nodes, ends, self._options)

    def with_all_boundaries(self, found: Candidate) -> Candidate:
        """``found`` with tables that say where else its stages could end."""
        if len(found.tables.cuts) > len(set(found.cuts)):
            return found
        unit_of = {node: u for u, nodes in self._units.nodes(data="nodes") for node in nodes}
        order = list(dict.fromkeys(unit_of[node] for node in found.nodes))
        ends = self._boundaries(order, range(len(order) + 1))
        counts = [ends.index(found.tables.cuts[cut]) for cut in found.cuts]
        tables = self._tables(order, found.nodes, counts)
        same = self._indices(tables, order, counts)
        return replace(found, tables=tables, cuts=tuple(same))

    def _solve(
        self, tables: IntervalTables, nodes: Sequence[int], pinned: Sequence[str | None]
    ) -> Candidate | None:
        best: Candidate | None = None
        for chain in device_chains(self._devices, pinned):
            self._chains.setdefault(tuple(slot.name for slot in chain), chain)
            found = solve_order(tables, nodes, chain, pinned, self._options)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
        return best

    def _offer(self, found: Candidate) -> None:
        self.first = self.first or found
        if self.best is None or found.rank < self.best.rank:
            self.best = found

    def _nodes(self, order: Sequence[int]) -> tuple[list[int], list[str | None]]:
        """The nodes of the units of ``order``, and the pin of each."""
        pairs = [(i, self._pin_of.get(u)) for u in order for i in self._units.nodes[u]["nodes"]]
        return [node for node, _ in pairs], [pin for _, pin in pairs]

    def _boundaries(self, order: Sequence[int], counts: Collection[int]) -> list[int]:
        """Positions of nodes after so many units of ``order``."""
        sizes = (len(self._units.nodes[unit]["nodes"]) for unit in order)
        ends = list(itertools.accumulate(sizes, initial=0))
        return [ends[count] for count in counts]

    def _indices(
        self, tables: IntervalTables, order: Sequence[int], counts: Collection[int]
    ) -> list[int]:
        """Which cuts of ``tables`` are after so many units of ``order``."""
        return [tables.cuts.index(boundary) for boundary in self._boundaries(order, counts)]

    def _in_program_order(
        self, order: Sequence[int], found: Candidate
    ) -> tuple[list[int], list[int]]:
        """``order`` with the units of every stage in program order, and after how many it ends."""
        boundaries = [found.tables.cuts[cut] for cut in found.cuts]
        ends = self._boundaries(order, range(len(order) + 1))
        counts = [bisect.bisect_left(ends, boundary) for boundary in boundaries]
        restated: list[int] = []
        for begin, end in itertools.pairwise(counts):
            restated += sorted(order[begin:end], key=self._place.__getitem__)
        return restated, counts

    def add_drawn(self, model: ModelUnits) -> None:
        """Try some orders that are drawn."""
        count = len(model.order)
        if not 0 < count <= _MOST_SAMPLED:
            return
        samples = min(_SAMPLES, max(1, _SAMPLED_UNITS // count))
        for order in sampled_orders(self._units, samples):
            self.add(order)

    def add_solved(self, model: ModelUnits) -> float:
        """Try the orders of the placements that `solve` finds; a lower bound on the criterion.

        The bound counts no stage's peak exactly, and where more than one chain of devices was
        tried, every position gets the best of them all.
        """
        best, options = self.best, self._options
        assert best is not None
        chains = list(self._chains.values())
        relaxed = chains[0] if len(chains) == 1 else relaxed_chain(chains)
        over = best.rank[0] > 1
        by_memory = options.objective == "memory" or over
        bound = 0.0
        if by_memory or best.fullest > _NEAR:
            problem = memory_problem(model, self._costs, best.slots, options)
            self._add_solution(model, solve(problem, most_alive=0))
            self.add_drawn(model)
            if by_memory:
                bound = self._least_peak(model, relaxed)
        if over:
            return bound
        best = self.best or best
        most = _most_bytes(best, options)
        problem = seconds_problem(model, self._costs, best.slots, options, most)
        alone = len(chains) == 1 and options.objective == "throughput"
        solution = solve(problem, most_alive=_MOST_ALIVE if alone else 0)
        self._add_solution(model, solution)
        if options.objective == "latency":
            problem = seconds_problem(model, self._costs, relaxed, options, [None] * len(relaxed))
            return float(np.min([slot.seconds for slot in problem.slots], axis=0).sum())
        if by_memory:
            return bound
        if solution is not None and alone:
            return solution.optimality.lower_bound
        most = [None if s.budget is None else s.budget - s.reserve for s in relaxed]
        return lower_bound(seconds_problem(model, self._costs, relaxed, options, most))

    def _least_peak(self, model: ModelUnits, chain: Sequence[DeviceSlot]) -> float:
        """A lower bound on the largest peak, in the unit of `Candidate.peak`."""
        budgets = [slot.budget for slot in self._devices if slot.budget is not None]
        known = max(budgets, default=None)  # what peaks are shares of where there is no budget
        measured = [s if s.budget is not None else replace(s, budget=known) for s in chain]
        spread = lower_bound(memory_problem(model, self._costs, measured, self._options))
        return max(spread, least_peak(model, self._costs, self._devices, len(chain), self._options))

    def add_returning(self, bound: float) -> None:
        """Where memory decides and the chain is not near ``bound``: devices that come again."""
        best = self.best
        assert best is not None
        if best.rank[0] <= 1 and (
            self._options.objective != "memory" or best.peak * (1 - GAIN) <= bound
        ):
            return
        # Along program order, whose stages run as they were recorded, and along the best one.
        starts = {id(c): c for c in (best, self.first, self.coarse) if c is not None}
        for start in starts.values():
            found = self._returning(start)
            if found is not None and is_better(found, best):
                self._offer(found)

    def _returning(self, start: Candidate) -> Candidate | None:
        found = find_noncontiguous(start, self._costs, self.pinned_nodes(start), self._options)
        if found is None:
            return None
        units = {node: u for u, nodes in self._units.nodes(data="nodes") for node in nodes}
        order = list(dict.fromkeys(units[node] for node in found.nodes))
        order, counts = self._in_program_order(order, found)
        nodes, pinned = self._nodes(order)
        if nodes == list(found.nodes):
            return found
        tables = self._tables(order, nodes, counts)
        same = self._indices(tables, order, counts)
        stated = replace(start, tables=tables, nodes=tuple(nodes))
        chains = NoncontiguousChains(stated, self._costs, pinned, self._options)
        return chains.candidate(found.slots, same)

    def _add_solution(self, model: ModelUnits, solution: Solution | None) -> None:
        if solution is None:
            return
        self._add_stages(model, np.array(solution.stage_of[:-1]))  # without the loss

    def _add_stages(self, model: ModelUnits, stage_of: NDArray[np.int64]) -> None:
        """Try the order in which every stage has its units in program order."""
        order = np.argsort(stage_of, kind="stable")
        kept = np.cumsum(np.bincount(stage_of)).tolist()
        self.add([model.order[i] for i in order], kept)


def _most_bytes(best: Candidate, options: PlanningOptions) -> list[float | None]:
    """What every stage may hold: its budget, and for least memory not much more than ``best``."""
    near = best.peak * _SLACK if options.objective == "memory" else np.inf
    found: list[float | None] = []
    for slot in best.slots:
        most = near * (slot.budget or reference_bytes(best.slots))
        if slot.budget is not None:
            most = min(most, slot.budget) - slot.reserve
        found.append(most if np.isfinite(most) else None)
    return found
