"""A partition problem, free of models: units, what they cost on each stage's device, what crosses.

A placement puts every unit on one of the stages 0 … k - 1 so that no edge goes back. Stage q pays

    load(q) = sum of seconds[q][u] over its units u + seconds_per_byte[q] * bytes that cross

where a value crosses if the stage holds some, but not all, of the units that make and need it
(Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
section 3). The largest load is the criterion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from placer.plan.types import Optimality

Vector = NDArray[np.float64]

_NEAR = 0.8  # share of a budget from which on it may bind


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedValue:
    """A value and the units that make and need it; a stage that holds only some of them pays.

    ``external``: the caller makes it, every stage that needs it receives it.
    """

    nbytes: float
    units: tuple[int, ...]
    external: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSlot:
    """A stage's device, and what every unit costs at that position of the chain.

    ``nbytes[u]`` is what unit u holds there at the peak: what stays, and what waits for backward
    times the micro-batches in flight at this position. ``budget`` None: no limit.
    """

    device: str
    seconds: Vector
    seconds_per_byte: float
    nbytes: Vector
    budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionProblem:
    """Units 0 … n - 1 with edges between them, and the chain of stages to put them on.

    ``pins``: unit -> device. Units on a cycle of edges share a stage. ``hollow`` units make no
    stage by themselves (the loss). Without ``may_be_empty`` each stage gets some unit.
    """

    num_units: int
    edges: tuple[tuple[int, int], ...]
    values: tuple[SharedValue, ...]
    slots: tuple[StageSlot, ...]
    pins: Mapping[int, str] = field(default_factory=dict)
    hollow: frozenset[int] = frozenset()
    may_be_empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The stage of every unit, and how good that is."""

    stage_of: tuple[int, ...]
    optimality: Optimality


def stage_loads(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> Vector:
    """The load of every stage, recomputed from the definition; O(uses * log(uses))."""
    k = len(problem.slots)
    loads = np.zeros(k)
    for q, slot in enumerate(problem.slots):
        loads[q] = slot.seconds[stage_of == q].sum()
    values = problem.values
    nbytes = np.array([value.nbytes for value in values])
    external = np.array([value.external for value in values], dtype=bool)
    sizes = [len(value.units) for value in values]
    units = np.fromiter(chain.from_iterable(v.units for v in values), np.int64, sum(sizes))
    held = np.unique(np.repeat(np.arange(len(values)), sizes) * k + stage_of[units])
    value, stage = np.divmod(held, k)  # each value on each stage that holds some of its units
    number = np.bincount(value, minlength=len(values))
    paid = external | (number > 1)
    pays = paid[value]
    crossing = np.bincount(stage[pays], weights=nbytes[value[pays]], minlength=k)
    found: Vector = loads + crossing * [slot.seconds_per_byte for slot in problem.slots]
    return found


def simple_bound(problem: PartitionProblem) -> float:
    """No placement can be better than its largest unit, or than all work spread evenly; O(n)."""
    seconds = np.min([slot.seconds for slot in problem.slots], axis=0)
    return max(float(seconds.max(initial=0.0)), float(seconds.sum()) / len(problem.slots))


def load_above_all(problem: PartitionProblem) -> float:
    """More than any stage's load in any placement."""
    crossing = 2 * sum(value.nbytes for value in problem.values)
    return 1.0 + max(float(s.seconds.sum() + s.seconds_per_byte * crossing) for s in problem.slots)


def largest_load(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> float:
    """The criterion: the load of the stage that has the most."""
    return float(stage_loads(problem, stage_of).max())


def is_limited(problem: PartitionProblem) -> bool:
    """Has any stage a budget?"""
    return any(slot.budget is not None for slot in problem.slots)


def is_within_budgets(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> bool:
    """Does every stage hold at most its budget, but for rounding?"""
    return all(
        slot.budget is None or slot.nbytes[stage_of == q].sum() <= slot.budget * (1 + 1e-12)
        for q, slot in enumerate(problem.slots)
    )


def is_tight(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> bool:
    """Is some stage near its budget, so that budgets may have shaped the answer?"""
    return any(
        slot.budget is not None and slot.nbytes[stage_of == q].sum() > _NEAR * slot.budget
        for q, slot in enumerate(problem.slots)
    )


def memory_as_load(problem: PartitionProblem) -> PartitionProblem:
    """The problem whose load is a stage's share of its budget; values cost nothing."""
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
    return replace(problem, slots=slots, values=ties)
