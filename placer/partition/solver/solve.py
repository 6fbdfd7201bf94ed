"""Solve a partition problem: a family of downsets for the first answer, all of them for the proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.branch import branch_floats
from placer.partition.solver.families import beam_rows, chain_rows, distinct
from placer.partition.solver.floats import assign_floats
from placer.partition.solver.interval import best_intervals
from placer.partition.solver.lattice import (
    Lattice,
    Words,
    build_lattice,
    floating_units,
    topological_order,
    unpack,
)
from placer.partition.solver.moves import move_units
from placer.partition.solver.problem import (
    PartitionProblem,
    SharedValue,
    Solution,
    stage_loads,
)
from placer.partition.solver.program import Borders, best_borders
from placer.partition.solver.reduce import Reduction, contract, fold_dominated, join_together
from placer.partition.solver.surviving import surviving_rows
from placer.partition.solver.windows import refine_borders
from placer.partition.solver.work import Work
from placer.plan.types import Optimality

StageOf = NDArray[np.int64]

_WIDTH = 8  # of the beam; measured: 16 finds nothing better on the published graphs
_NARROW, _MANY = 4, 600  # from so many units on: 1% worse on random graphs, a third of the time
_MOST_ALIVE = 150_000  # partly decided downsets at a time in a proof; about a second
_WORK, _LEAST_WORK = 7e3, 3e8  # nanoseconds for all proofs of a problem, per downset alive; least
_FEW = 10  # a tenth of them for the first attempt, which settles most problems
_FIRST_SHARE = 1 / 16  # of the gap between bound and value, then doubled
_MOST_FAILED = 3  # attempts with too many downsets, the first apart
_MOST_BITS = 20_000_000  # of their rows, for the memory they take
_TOLERANCE = 1e-10
_LARGE = 1500  # units; from here on stages are intervals of one order, improved at their borders
_FACTORS = (1.2, 1.6, 3.0)  # of the trivial bound: where a first answer is looked for
_NEAR = 0.8  # share of a budget from which on it may bind


def solve(problem: PartitionProblem, *, most_alive: int = _MOST_ALIVE) -> Solution | None:
    """The placement of least largest load, with a lower bound on the load of any placement.

    Chains of a few topological orders and a narrow beam give an answer; if at most
    ``most_alive`` partly decided downsets could be better at a time, and the work that goes with
    these suffices, all of them are tried, with units without edges on all stages, and the answer is
    optimal (`Optimality.proven`). Deterministic. None when no placement was found that meets the
    budgets.
    """
    slots = problem.slots
    if problem.may_be_empty and all(slot is slots[0] for slot in slots):
        problem = replace(problem, slots=slots[: max(1, problem.num_units)])  # more stay empty
    return _solve(problem, most_alive, Work(max(_LEAST_WORK, _WORK * most_alive)))


def _solve(problem: PartitionProblem, most_alive: int, work: Work) -> Solution | None:
    joined = join_together(problem)
    if joined.problem.num_units > _LARGE:
        return _solve_large(problem, joined)
    small = joined.problem
    itself = np.arange(small.num_units)
    best, bound = _Best(small), _trivial_bound(small)
    relaxed = fold_dominated(small, relaxed=True)
    folded = contract(small, relaxed.unit_of.tolist())  # the same units, which hold their bytes
    best.offer(_heuristic(folded.problem), folded.unit_of)
    moved = False  # the best one, over worse placements, without finding a better one
    for rung, (reduction, branched) in enumerate(_ladder(small, relaxed)):
        if rung and best.is_tight and not branched:
            best.offer(_heuristic(reduction.problem), reduction.unit_of)
        if best.stage_of is None and _is_limited(small):
            best.offer(_smallest(small, most_alive, Work(work.left / 2)), itself)
        if best.stage_of is not None and best.is_tight and not _reached(best.value, bound):
            best.offer(move_units(small, best.stage_of, bound), itself)
        lattice = _lattice(reduction.problem)
        bound, found = _prove(lattice, best.value, most_alive, work, bound=bound, branched=branched)
        best.offer(found, reduction.unit_of)
        moved = False
        if found is not None and not _reached(best.value, bound):
            moved = best.offer(move_units(small, found[reduction.unit_of], bound), itself)
        if _reached(best.value, bound):
            break
    if best.stage_of is None:
        return None
    if best.is_tight and not moved and not _reached(best.value, bound):
        best.offer(move_units(small, best.stage_of, bound), itself)
    stage_of = best.stage_of[joined.unit_of]
    value = _largest(problem, stage_of)
    return Solution(
        stage_of=tuple(stage_of.tolist()),
        optimality=Optimality(
            criterion="largest stage load", value=value, lower_bound=min(bound, value)
        ),
    )


def _ladder(problem: PartitionProblem, relaxed: Reduction) -> Iterator[tuple[Reduction, bool]]:
    """Reductions to prove on, each with whether its floats are branched on; from the loosest to exact.

    Folds are exact but for budgets, floats that are left out but for budgets and for what they cost
    among themselves.
    """
    yield relaxed, False
    exact = fold_dominated(problem, weightless=True)
    if exact.problem.num_units > relaxed.problem.num_units:
        yield exact, False
    if floating_units(exact.problem):
        yield exact, True


def _solve_large(problem: PartitionProblem, joined: Reduction) -> Solution | None:
    """Intervals of a few orders, then windows around the borders; the bound is the trivial one."""
    small = joined.problem
    preds, succs = _adjacency(small)
    orders = [
        topological_order(preds, succs, range(small.num_units)),
        _newest_first(preds, succs),
        _newest_first(succs, preds)[::-1],
    ]
    best, best_order, value = None, None, _above_all(small)
    for order in (np.array(order, dtype=np.int64) for order in orders):
        found = best_intervals(small, order, value)
        if found is not None:
            best, best_order, value = found, order, _largest(small, found)
    if best is None or best_order is None:
        return None
    best = refine_borders(small, best_order, best, _solve_window)
    stage_of = best[joined.unit_of]
    value = _largest(problem, stage_of)
    return Solution(
        stage_of=tuple(stage_of.tolist()),
        optimality=Optimality(
            criterion="largest stage load",
            value=value,
            lower_bound=min(_trivial_bound(small), value),
        ),
    )


def _solve_window(problem: PartitionProblem) -> StageOf | None:
    joined = join_together(problem)  # borders move by whole knots of the window
    found = _heuristic(joined.problem, width=2)
    return None if found is None else found[joined.unit_of]


class _Best:
    """The best placement so far that meets the budgets."""

    def __init__(self, problem: PartitionProblem) -> None:
        self._problem = problem
        self.stage_of: StageOf | None = None
        self.value = np.inf

    @property
    def is_tight(self) -> bool:
        """Whether budgets may have shaped the answer, or prevented one."""
        return self.stage_of is None or _is_tight(self._problem, self.stage_of)

    def offer(self, stage_of: StageOf | None, unit_of: StageOf) -> bool:
        """Take ``stage_of`` (of the units that ``unit_of`` maps to) if it is better; whether it is."""
        if stage_of is None:
            return False
        stage_of = stage_of[unit_of]
        value = _largest(self._problem, stage_of)
        better = value < self.value and _is_feasible(self._problem, stage_of)
        if better:
            self.stage_of, self.value = stage_of, value
        return better


def _reached(value: float, bound: float) -> bool:
    return value <= bound * (1 + _TOLERANCE)


def _heuristic(problem: PartitionProblem, *, width: int | None = None) -> StageOf | None:
    """The best placement with borders among a few chains and a beam."""
    width = width or (_WIDTH if problem.num_units < _MANY else _NARROW)
    lattice = _lattice(problem)
    orders = [np.arange(lattice.num_units), *_deep_orders(lattice)]
    chains = distinct(np.concatenate([chain_rows(lattice, order) for order in orders]))
    best, value = _try(lattice, chains, None, np.inf)
    rows = distinct(np.concatenate([chains, beam_rows(lattice, width)]))
    best, value = _try(lattice, rows, best, value)
    if _is_limited(problem) and (best is None or _is_tight(problem, best)):
        smallest = _smallest(problem, 0, Work())
        if smallest is not None:
            order = np.lexsort((np.arange(lattice.num_units), smallest[lattice.order]))
            rows = distinct(np.concatenate([rows, chain_rows(lattice, order)]))
            best, value = _try(lattice, rows, best, value)
    return best


def _try(
    lattice: Lattice, rows: Words, best: StageOf | None, value: float
) -> tuple[StageOf | None, float]:
    """The better of ``best`` and the best placement with borders among ``rows``."""
    least, most = _trivial_bound(lattice.problem), _above_all(lattice.problem)
    limits = [value * (1 - _TOLERANCE)]
    if not np.isfinite(value):  # low limits first: time grows with the limit
        limits = [*(factor * least for factor in _FACTORS if factor * least < most), most]
    borders = None
    for limit in limits:
        borders = borders or best_borders(lattice, rows, limit)
    if borders is None:
        return best, value
    stage_of = _stages(lattice, borders)
    reached = _largest(lattice.problem, stage_of)
    if reached < value and _is_feasible(lattice.problem, stage_of):
        return stage_of, reached
    return best, value


def _prove(
    lattice: Lattice,
    value: float,
    most_alive: int,
    work: Work,
    *,
    bound: float = 0.0,
    branched: bool = False,
) -> tuple[float, StageOf | None]:
    """A lower bound on all placements, and the best placement if one below ``value`` was found.

    All placements below a limit have their borders among the downsets that survive it, and these
    grow exponentially with the limit. So ``value`` is tried with few downsets, then limits from
    ``bound`` (known before) upwards: the first that holds a placement holds the best one. Where
    the downsets are too many, limits between that one and the last that held nothing are tried,
    as long as there is ``work`` left.
    """
    problem = lattice.problem
    least = max(bound, _trivial_bound(problem))
    if _reached(value, least) or not most_alive:
        return least, None
    if not np.isfinite(value):
        value = _above_all(problem)
    left = min(most_alive, _MOST_BITS // max(1, lattice.num_units))
    empty, full = 0.0, np.inf  # shares of the gap: nothing is below; too many downsets are
    share, most, failed = 1.0, left // _FEW, 0
    while failed <= _MOST_FAILED and left > 0 and not work.is_spent():
        limit = (least + share * (value - least)) * (1 - _TOLERANCE)
        rows = surviving_rows(lattice, limit, most=most, work=work)
        if rows is None:
            failed += 1
            full = share if failed > 1 else np.inf
            most = left if failed == 1 else most // 2
        elif branched:
            answer = branch_floats(lattice, rows, limit, work)
            if answer.stage_of is not None or not answer.finished:
                known = max(least, answer.bound, least + empty * (value - least))
                return known * (1 if answer.finished else 1 - _TOLERANCE), answer.stage_of
            if share == 1.0:
                return value, None
            empty, left = share, left - len(rows)
            most = min(most, left)
        else:
            borders = best_borders(lattice, rows, limit, work)
            if borders is None and work.is_spent():
                break
            if borders is not None:
                return borders.value, _stages(lattice, borders)
            if share == 1.0:
                return value, None
            empty, left = share, left - len(rows)
            most = min(most, left)
        share = (empty + full) / 2 if full <= 1 else min(1.0, max(_FIRST_SHARE, 4 * empty))
    return (least + empty * (value - least)) * (1 - _TOLERANCE), None


def lower_bound(problem: PartitionProblem) -> float:
    """No placement can be better than its largest unit, or than all work spread evenly; O(n)."""
    return _trivial_bound(join_together(problem).problem)


def _trivial_bound(problem: PartitionProblem) -> float:
    """No placement can be better than its largest unit, or than all work spread evenly."""
    seconds = np.min([slot.seconds for slot in problem.slots], axis=0)
    return max(float(seconds.max(initial=0.0)), float(seconds.sum()) / len(problem.slots))


def _above_all(problem: PartitionProblem) -> float:
    crossing = 2 * sum(value.nbytes for value in problem.values)
    return 1.0 + max(float(s.seconds.sum() + s.seconds_per_byte * crossing) for s in problem.slots)


def _lattice(problem: PartitionProblem) -> Lattice:
    loose = set(floating_units(problem))
    preds, succs = _adjacency(problem)
    order = topological_order(preds, succs, range(problem.num_units))
    return build_lattice(problem, [u for u in order if u not in loose])


def _adjacency(problem: PartitionProblem) -> tuple[list[list[int]], list[list[int]]]:
    preds: list[list[int]] = [[] for _ in range(problem.num_units)]
    succs: list[list[int]] = [[] for _ in range(problem.num_units)]
    for a, b in sorted(set(problem.edges)):
        preds[b].append(a)
        succs[a].append(b)
    return preds, succs


def _deep_orders(lattice: Lattice) -> list[NDArray[np.int64]]:
    """Newest first: the unit that became ready last, from the front and from the back."""
    front = _newest_first(lattice.preds, lattice.succs)
    back = _newest_first(lattice.succs, lattice.preds)
    return [np.array(front, dtype=np.int64), np.array(back[::-1], dtype=np.int64)]


def _newest_first(preds: Sequence[Sequence[int]], succs: Sequence[Sequence[int]]) -> list[int]:
    waiting = [len(p) for p in preds]
    ready = [u for u in reversed(range(len(preds))) if not waiting[u]]
    order = []
    while ready:
        unit = ready.pop()
        order.append(unit)
        for reader in reversed(succs[unit]):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return order


def _smallest(problem: PartitionProblem, most_alive: int, work: Work) -> StageOf | None:
    """A placement whose largest share of a budget is small: memory as the load, no values."""
    slots = tuple(
        replace(
            slot,
            seconds=slot.nbytes / slot.budget if slot.budget else np.zeros(problem.num_units),
            seconds_per_byte=0.0,
            budget=None,
        )
        for slot in problem.slots
    )
    ties = tuple(SharedValue(nbytes=v.nbytes, units=v.units) for v in problem.values)
    solution = _solve(replace(problem, slots=slots, values=ties), most_alive, work)
    return None if solution is None else np.array(solution.stage_of, dtype=np.int64)


def _is_limited(problem: PartitionProblem) -> bool:
    return any(slot.budget is not None for slot in problem.slots)


def _is_tight(problem: PartitionProblem, stage_of: StageOf) -> bool:
    """Whether some stage is near its budget, so that budgets may have shaped the answer."""
    return any(
        slot.budget is not None and slot.nbytes[stage_of == q].sum() > _NEAR * slot.budget
        for q, slot in enumerate(problem.slots)
    )


def _stages(lattice: Lattice, borders: Borders) -> StageOf:
    """The stage of every unit: the first whose border holds it; floats where they cost least."""
    held = unpack(np.stack(borders.rows), lattice.num_units)
    stage_of = np.full(lattice.problem.num_units, -1, dtype=np.int64)
    stage_of[lattice.order] = np.argmax(held, axis=0)
    return assign_floats(lattice.problem, stage_of)


def _largest(problem: PartitionProblem, stage_of: StageOf) -> float:
    return float(stage_loads(problem, stage_of).max())


def _is_feasible(problem: PartitionProblem, stage_of: StageOf) -> bool:
    return all(
        slot.budget is None or slot.nbytes[stage_of == q].sum() <= slot.budget * (1 + 1e-12)
        for q, slot in enumerate(problem.slots)
    )
