"""Units without edges ("isolated units"): left out of the search, each then goes where it costs least.

The published graphs have them: backward nodes of no colour class. Captured models have none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from placer.partition.solver.problem import PartitionProblem, SharedValue, Vector, stage_loads

_MOST_ROUNDS = 10


def isolated_units(problem: PartitionProblem) -> list[int]:
    """Units without edges that share values with others."""
    tied = {u for edge in problem.edges for u in edge} | {*problem.pins} | problem.auxiliary
    tied |= {u for value in problem.values if value.external for u in value.units}
    free = {u for v in problem.values if len(v.units) > 1 for u in v.units} - tied
    return sorted(free) if len(free) < problem.num_units else []


def without_units(
    problem: PartitionProblem, units: Collection[int]
) -> tuple[PartitionProblem, NDArray[np.int64]]:
    """The problem without ``units``, which have no edges, and each unit's number in it (-1: left out)."""
    kept = [u for u in range(problem.num_units) if u not in units]
    number = np.full(problem.num_units, -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    values = []
    for value in problem.values:
        sharing = tuple(int(number[u]) for u in value.units if number[u] >= 0)
        if sharing and (value.external or len(sharing) > 1):
            values.append(replace(value, units=sharing))
    slots = tuple(
        replace(slot, seconds=slot.seconds[kept], nbytes=slot.nbytes[kept])
        for slot in problem.slots
    )
    return PartitionProblem(
        num_units=len(kept),
        edges=tuple((int(number[a]), int(number[b])) for a, b in problem.edges),
        values=tuple(values),
        slots=slots,
        pins={int(number[u]): device for u, device in problem.pins.items()},
        auxiliary=frozenset(int(number[u]) for u in problem.auxiliary),
    ), number


def assign_isolated(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """``stage_of`` with the units at -1 put on stages; a local search, not optimal.

    Each goes where the loads, sorted from the largest, are then the least, the costliest unit
    first; they move until no move helps. O(rounds * isolated units * stages * uses).
    """
    isolated = np.flatnonzero(stage_of < 0)
    if not len(isolated):
        return stage_of
    values_of: dict[int, list[SharedValue]] = {int(u): [] for u in isolated}
    for value in problem.values:
        for u in value.units:
            if u in values_of:
                values_of[u].append(value)
    seconds = problem.slots[0].seconds
    weight = {u: sum(v.nbytes for v in values_of[u]) + seconds[u] for u in values_of}
    order = sorted(values_of, key=lambda u: (-weight[u], u))
    stage_of = stage_of.copy()
    for u in order:  # a first guess: beside most of what it shares values with
        near = np.zeros(len(problem.slots))
        for value in values_of[u]:
            for q in {int(stage_of[w]) for w in value.units} - {-1}:
                near[q] += value.nbytes
        stage_of[u] = int(np.argmax(near))
    loads = stage_loads(problem, stage_of)
    held = np.array([s.nbytes[stage_of == q].sum() for q, s in enumerate(problem.slots)])
    for _ in range(_MOST_ROUNDS):
        moved = False
        for u in order:
            moved |= _move(problem, values_of[u], u, stage_of, loads, held)
        if not moved:
            break
    return stage_of


def _move(
    problem: PartitionProblem,
    values: list[SharedValue],
    unit: int,
    stage_of: NDArray[np.int64],
    loads: Vector,
    held: Vector,
) -> bool:
    """Move ``unit`` in place to the stage that is best for it; whether it moved."""
    home = int(stage_of[unit])
    others = [{int(stage_of[w]) for w in value.units if w != unit} for value in values]

    def with_unit_at(stage: int) -> tuple[tuple[float, ...], Vector]:
        change = np.zeros(len(loads))
        change[home] -= problem.slots[home].seconds[unit]
        change[stage] += problem.slots[stage].seconds[unit]
        for value, stages in zip(values, others, strict=True):
            for at, sign in ((home, -1.0), (stage, 1.0)):
                paying = stages | {at}
                if len(paying) > 1:
                    for q in paying:
                        change[q] += sign * value.nbytes * problem.slots[q].seconds_per_byte
        after = loads + change
        over = [
            max(0.0, held[q] + nbytes - slot.budget)
            for q, nbytes in (
                (stage, problem.slots[stage].nbytes[unit] if stage != home else 0.0),
                (home, -problem.slots[home].nbytes[unit] if stage != home else 0.0),
            )
            if (slot := problem.slots[q]).budget is not None
        ]
        return (sum(over), *sorted(after.tolist(), reverse=True)), after

    near = sorted(set().union(*others, {home}) - {-1})
    most_saving = int(np.argmin(loads))
    now, _ = with_unit_at(home)
    best = home
    for stage in dict.fromkeys([*near, most_saving]):
        rank, after = with_unit_at(stage)
        if rank < now and stage != home and _clearly(rank, now):
            now, best, best_loads = rank, stage, after
    if best == home:
        return False
    loads[:] = best_loads
    held[home] -= problem.slots[home].nbytes[unit]
    held[best] += problem.slots[best].nbytes[unit]
    stage_of[unit] = best
    return True


def _clearly(rank: tuple[float, ...], now: tuple[float, ...]) -> bool:
    """Less by more than rounding, so that the search ends."""
    for a, b in zip(rank, now, strict=True):
        if abs(a - b) > 1e-9 * max(abs(a), abs(b)):
            return a < b
    return False
