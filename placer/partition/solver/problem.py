"""Defines partition problems: units, their costs on each stage's device, and the values they share.

A placement assigns every unit to one of the stages 0 … k - 1 so that no edge goes back. The load of stage
q, in seconds, is

    load(q) = sum of seconds[q][u] over its units u + seconds_per_byte[q] * crossing bytes

where a value crosses if the stage has some, but not all, of the units that make and read it
(Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
section 3). The largest load is minimised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedValue:
    """A value with the units that make and read it; a stage that has only some of them pays for it.

    An ``external`` value is an input of the model, for which every stage that reads it pays.
    """

    nbytes: float
    units: tuple[int, ...]
    external: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSlot:
    """A stage's device, and the cost of every unit at that position of the chain.

    ``seconds[u]`` and ``nbytes[u]`` are those of unit u. The bytes of a stage may add up to at most
    ``budget`` (None: no limit). ``seconds_per_byte`` is the time for a byte that crosses a boundary.
    """

    device: str
    seconds: Vector
    seconds_per_byte: float
    nbytes: Vector
    budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionProblem:
    """Units 0 … n - 1 with edges between them, and the chain of stages to put them on.

    ``pins`` has the devices that units must be on. The graph has no cycle. Each stage must
    have a unit that is not ``auxiliary`` (the loss is auxiliary).
    """

    num_units: int
    edges: tuple[tuple[int, int], ...]
    values: tuple[SharedValue, ...]
    slots: tuple[StageSlot, ...]
    pins: Mapping[int, str] = field(default_factory=dict)
    auxiliary: frozenset[int] = frozenset()


def stage_loads(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> Vector:
    """The load of every stage in seconds, computed by the definition; O(uses * log(uses))."""
    k = len(problem.slots)
    loads = np.zeros(k)
    for q, slot in enumerate(problem.slots):
        loads[q] = slot.seconds[stage_of == q].sum()
    values = problem.values
    nbytes = np.array([value.nbytes for value in values])
    external = np.array([value.external for value in values], dtype=bool)
    sizes = [len(value.units) for value in values]
    units = np.fromiter(chain.from_iterable(v.units for v in values), np.int64, sum(sizes))
    pairs = np.unique(np.repeat(np.arange(len(values)), sizes) * k + stage_of[units])
    value, stage = np.divmod(pairs, k)  # each value on each stage that has some of its units
    number = np.bincount(value, minlength=len(values))
    pays = (external | (number > 1))[value]
    crossing = np.bincount(stage[pays], weights=nbytes[value[pays]], minlength=k)
    found: Vector = loads + crossing * [slot.seconds_per_byte for slot in problem.slots]
    return found


def simple_bound(problem: PartitionProblem) -> float:
    """A lower bound on the largest load: that of the largest unit, or all work divided evenly; O(n)."""
    seconds = np.min([slot.seconds for slot in problem.slots], axis=0)
    return max(float(seconds.max(initial=0.0)), float(seconds.sum()) / len(problem.slots))


def load_above_all(problem: PartitionProblem) -> float:
    """More than any stage's load in any placement."""
    crossing = 2 * sum(value.nbytes for value in problem.values)
    return 1.0 + max(float(s.seconds.sum() + s.seconds_per_byte * crossing) for s in problem.slots)


def largest_load(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> float:
    """The load of the slowest stage, which is the objective to minimise."""
    return float(stage_loads(problem, stage_of).max())


def is_within_budgets(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> bool:
    """Whether the bytes of every stage are within its budget, except for rounding."""
    return all(
        slot.budget is None or slot.nbytes[stage_of == q].sum() <= slot.budget * (1 + 1e-12)
        for q, slot in enumerate(problem.slots)
    )
