"""Units that some best placement has beside their only neighbour: joined before the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.msr.solver.reduce import Reduction, contract
from placer.partition.solver.problem import PartitionProblem, StageSlot, Vector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LooseSlot(StageSlot):
    """A stage's device in a relaxation, where some bytes may wait on other stages.

    ``earlier[u]`` is held here if unit u is, or by an earlier stage; ``later[u]`` here or by a
    later one.
    """

    earlier: Vector
    later: Vector


def fold_dominated(
    problem: PartitionProblem, *, relaxed: bool = False, weightless: bool = False
) -> Reduction:
    """Join a unit with its only reader (or only source) where no stage is ever better off without.

    Let v be the only successor (or predecessor) of u, or any unit if u has neither. Moving u to the
    stage of v keeps all edges forward, unloads the stage it leaves, and changes the load of v's by
    at most the seconds of u, plus the bytes of u's values that v does not share, less those that u
    and v share with nobody. Where that is <= 0 on every device some best placement has them
    together, memory apart: ``relaxed`` lets the bytes that u holds wait on any stage where u may
    be, in parts, so that the best of the reduced problem is no worse than the original's;
    ``weightless`` joins only units that hold no bytes, which is exact under budgets, too. Only right
    where stages may be empty.
    """
    unit_of = np.arange(problem.num_units)
    while True:
        leaders, folded = _foldable(problem, weightless=weightless)
        if not folded:
            return Reduction(problem=problem, unit_of=unit_of)
        if relaxed:
            edges = frozenset(problem.edges)
            loose = tuple(_loosen(slot, folded, edges) for slot in problem.slots)
            problem = replace(problem, slots=loose)
        step = _contract(problem, leaders)
        problem, unit_of = step.problem, step.unit_of[unit_of]


def _contract(problem: PartitionProblem, leaders: Sequence[int]) -> Reduction:
    """`contract`, with the bytes that may wait elsewhere."""
    step = contract(problem, leaders)
    count = step.problem.num_units

    def sums(weights: Vector) -> Vector:
        return np.bincount(step.unit_of, weights=weights, minlength=count).astype(np.float64)

    slots = tuple(
        replace(new, earlier=sums(old.earlier), later=sums(old.later))
        if isinstance(old, LooseSlot) and isinstance(new, LooseSlot)
        else new
        for old, new in zip(problem.slots, step.problem.slots, strict=True)
    )
    return replace(step, problem=replace(step.problem, slots=slots))


def _loosen(
    slot: StageSlot, folded: Mapping[int, int], edges: frozenset[tuple[int, int]]
) -> StageSlot:
    """The slot with the bytes of folded units free to wait on any stage that their edge allows.

    A unit before its reader is there or earlier, and so is what waits earlier than that unit; what
    waits later than it may be anywhere, and is forgotten.
    """
    if slot.budget is None:
        return slot
    nbytes = slot.nbytes.copy()
    earlier = slot.earlier.copy() if isinstance(slot, LooseSlot) else np.zeros(len(nbytes))
    later = slot.later.copy() if isinstance(slot, LooseSlot) else np.zeros(len(nbytes))
    for u, v in folded.items():
        earlier[u] = earlier[u] + nbytes[u] if (u, v) in edges else 0.0
        later[u] = later[u] + nbytes[u] if (v, u) in edges else 0.0
        nbytes[u] = 0.0
    return LooseSlot(
        device=slot.device,
        seconds=slot.seconds,
        seconds_per_byte=slot.seconds_per_byte,
        nbytes=nbytes,
        budget=slot.budget,
        earlier=earlier,
        later=later,
    )


def _foldable(problem: PartitionProblem, *, weightless: bool) -> tuple[list[int], dict[int, int]]:
    """A leader per unit, and what unit each folds into; every unit is in one fold at most."""
    n = problem.num_units
    folds = _Folds(problem)
    taken = np.zeros(n, dtype=bool)
    heavy = np.zeros(n, dtype=bool)
    for slot in problem.slots:
        if weightless and slot.budget is not None:
            heavy |= slot.nbytes > 0
    leaders: list[int] = list(range(n))
    folded: dict[int, int] = {}
    for u in range(n):
        if taken[u] or heavy[u]:
            continue
        v = next((v for v in folds.partners(u) if not taken[v] and folds.is_free(u, v)), None)
        if v is not None:
            leaders[u] = leaders[v] = min(u, v)
            taken[[u, v]] = True
            folded[u] = v
    return leaders, folded


class _Folds:
    """Which unit may be joined with which, by the rule of `fold_dominated`."""

    def __init__(self, problem: PartitionProblem) -> None:
        n = problem.num_units
        self._pins = problem.pins
        self._preds: list[set[int]] = [set() for _ in range(n)]
        self._succs: list[set[int]] = [set() for _ in range(n)]
        for a, b in problem.edges:
            self._preds[b].add(a)
            self._succs[a].add(b)
        self._values_of: list[list[tuple[frozenset[int], float]]] = [[] for _ in range(n)]
        self._between: dict[tuple[int, ...], float] = {}  # bytes that two units share with nobody
        for value in problem.values:
            units = frozenset(value.units)
            for u in value.units:
                self._values_of[u].append((units, value.nbytes))
            if len(units) == 2 and not value.external:
                pair = tuple(sorted(units))
                self._between[pair] = self._between.get(pair, 0.0) + value.nbytes
        slots = {(s.seconds.tobytes(), s.seconds_per_byte): s for s in problem.slots}
        self._costs = [(s.seconds.tolist(), s.seconds_per_byte) for s in slots.values()]

    def partners(self, u: int) -> list[int]:
        """The units that ``u`` may move to with all edges forward; none if that never pays."""
        total = sum(nbytes for _, nbytes in self._values_of[u])
        if any(seconds[u] > rate * total for seconds, rate in self._costs):
            return []  # it costs more than any value that it could save
        if not self._succs[u] and not self._preds[u]:
            return sorted({w for units, _ in self._values_of[u] for w in units} - {u})
        single = [units for units in (self._succs[u], self._preds[u]) if len(units) == 1]
        return sorted(set().union(*single))

    def is_free(self, u: int, v: int) -> bool:
        """Does ``u`` cost no stage anything that gets it along with ``v``?"""
        if self._pins.get(u) != self._pins.get(v):
            return False
        alone = self._between.get((min(u, v), max(u, v)), 0.0)
        if any(seconds[u] > rate * alone for seconds, rate in self._costs):
            return False  # whatever else it costs
        new = sum(nbytes for units, nbytes in self._values_of[u] if v not in units)
        return all(seconds[u] + rate * (new - alone) <= 0 for seconds, rate in self._costs)
