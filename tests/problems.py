"""Partition problems that several tests solve."""

from __future__ import annotations

import numpy as np

from placer.partition import PartitionProblem, SharedValue, StageSlot


def tight_problem(budget: float = 4.0) -> PartitionProblem:
    """Unit 2 is fastest on the stage of its reader 3; with a budget of 4 it fits only on an earlier stage."""
    slot = StageSlot(
        device="d",
        seconds=np.array([0.0, 5.0, 0.0, 5.0, 1.0]),
        seconds_per_byte=1.0,
        nbytes=np.array([1.0, 1.0, 2.0, 3.0, 0.0]),
        budget=budget,
    )
    edges = ((0, 1), (1, 3), (2, 3), (3, 4))
    return PartitionProblem(
        num_units=5,
        edges=edges,
        values=tuple(SharedValue(nbytes=1.0, units=edge) for edge in edges),
        slots=(slot,) * 2,
    )
