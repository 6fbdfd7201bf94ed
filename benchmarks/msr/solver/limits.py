"""Memory limits that rule out good placements: which problems have them, and placements that fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.msr.proof.search import is_reached
from benchmarks.msr.solver.moves import move_units
from placer.partition.solver.problem import (
    PartitionProblem,
    SharedValue,
    is_within_budgets,
    largest_load,
)
from placer.partition.solver.search import StageOf

_NEAR = 0.8  # share of a budget from which on it may rule out better placements


def is_limited(problem: PartitionProblem) -> bool:
    """Does any stage have a budget?"""
    return any(slot.budget is not None for slot in problem.slots)


def is_tight(problem: PartitionProblem, stage_of: NDArray[np.int64]) -> bool:
    """Is some stage so full that its budget may have ruled out a better placement?"""
    return any(
        slot.budget is not None and slot.nbytes[stage_of == q].sum() > _NEAR * slot.budget
        for q, slot in enumerate(problem.slots)
    )


def memory_as_load(problem: PartitionProblem) -> PartitionProblem:
    """The problem whose loads are shares of the budgets instead of seconds; values cost nothing."""
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


class Best:
    """The best placement of ``problem`` so far that is within the budgets."""

    def __init__(self, problem: PartitionProblem) -> None:
        self._problem = problem
        self.stage_of: StageOf | None = None
        self.value = np.inf

    @property
    def is_tight(self) -> bool:
        """Whether budgets may have ruled out a better placement, or all."""
        return self.stage_of is None or is_tight(self._problem, self.stage_of)

    def offer(self, stage_of: StageOf | None) -> bool:
        """Keep ``stage_of`` if it is better; returns whether it is."""
        if stage_of is None:
            return False
        value = largest_load(self._problem, stage_of)
        better = value < self.value and is_within_budgets(self._problem, stage_of)
        if better:
            self.stage_of, self.value = stage_of, value
        return better

    def improve(self, bound: float) -> None:
        """Move units one by one if budgets matter and the placement is not optimal by ``bound``."""
        if self.stage_of is not None and self.is_tight and not is_reached(self.value, bound):
            self.offer(move_units(self._problem, self.stage_of, bound))
