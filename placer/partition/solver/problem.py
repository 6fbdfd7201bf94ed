"""A partition problem, free of models: units, what they cost on each stage's device, what crosses.

A placement puts every unit on one of the stages 0 … k - 1 so that no edge goes back. Stage q pays

    load(q) = sum of seconds[q][u] over its units u + seconds_per_byte[q] * bytes that cross

where a value crosses if the stage holds some, but not all, of the units that make and need it
(Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
section 3). With ``relayed`` a value passes through every stage between its first and its last unit,
and each of its borders is paid: once out, once in. The largest load is the criterion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from placer.plan.types import Optimality

Vector = NDArray[np.float64]


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
    times the micro-batches in flight at this position. ``budget`` None: no limit. In a relaxation
    (`reduce.fold_dominated`), ``earlier[u]`` is held here if u is, or by an earlier stage;
    ``later[u]`` here or by a later one. None: nothing is.
    """

    device: str
    seconds: Vector
    seconds_per_byte: float
    nbytes: Vector
    budget: float | None = None
    earlier: Vector | None = None
    later: Vector | None = None

    @property
    def nbytes_or_earlier(self) -> Vector:
        """Bytes that are here or on an earlier stage where the unit is here."""
        return self.nbytes if self.earlier is None else self.nbytes + self.earlier

    @property
    def nbytes_or_later(self) -> Vector:
        """Bytes that are here or on a later stage where the unit is here."""
        return self.nbytes if self.later is None else self.nbytes + self.later


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionProblem:
    """Units 0 … n - 1 with edges between them, and the chain of stages to put them on.

    ``pins``: unit -> device; ``together``: groups that share a stage. ``hollow`` units make no
    stage by themselves (the loss). Without ``may_be_empty`` each stage gets some unit.
    """

    num_units: int
    edges: tuple[tuple[int, int], ...]
    values: tuple[SharedValue, ...]
    slots: tuple[StageSlot, ...]
    pins: Mapping[int, str] = field(default_factory=dict)
    together: tuple[tuple[int, ...], ...] = ()
    hollow: frozenset[int] = frozenset()
    may_be_empty: bool = False
    relayed: bool = False


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
    first = np.searchsorted(value, np.arange(len(values)))
    number = np.bincount(value, minlength=len(values))
    paid = external | (number > 1)
    crossing = np.zeros(k)
    if problem.relayed:
        for v in np.flatnonzero(paid & ~external):
            lowest, highest = stage[first[v]], stage[first[v] + number[v] - 1]
            crossing[lowest : highest + 1] += 2 * nbytes[v]  # out of one stage, into the next
            crossing[[lowest, highest]] -= nbytes[v]
        paid &= external
    pays = paid[value]
    crossing += np.bincount(stage[pays], weights=nbytes[value[pays]], minlength=k)
    found: Vector = loads + crossing * [slot.seconds_per_byte for slot in problem.slots]
    return found
