"""Partition: costs, devices and pins in, stages on devices out.

Begin with `choose`: it tries orders of the model's units and keeps the best stages along them.

=====================  ===========================================================================
units, arrange         the graph of units; where stages may end, and which device comes when
candidate, chain       the best stages along one order
noncontiguous, fold    devices that get several stages which are not neighbours
bound                  what the largest peak of no placement is below
model                  a captured model as a problem of `solver`
describe, types        the answer, and why each boundary is where it is
`stage_cost`           what a stage costs: bytes, seconds
`solver`               partition problems without an order, and a lower bound
`policy`               what to recompute and to offload in one stage
=====================  ===========================================================================
"""

from placer.partition.choose import choose_partition, rate_partition
from placer.partition.solver.problem import (
    PartitionProblem,
    SharedValue,
    Solution,
    StageSlot,
    stage_loads,
)
from placer.partition.solver.solve import solve
from placer.partition.stage_cost.cache import TableCache
from placer.partition.types import DeviceSlot, Partition, PlanningOptions
from placer.plan.types import Optimality

__all__ = [
    "DeviceSlot",
    "Optimality",
    "Partition",
    "PartitionProblem",
    "PlanningOptions",
    "SharedValue",
    "Solution",
    "StageSlot",
    "TableCache",
    "choose_partition",
    "rate_partition",
    "solve",
    "stage_loads",
]
