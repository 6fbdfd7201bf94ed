"""Partition: costs, devices and pins in, stages on devices out.

Begin with `choose`: it tries orders of the model's units and keeps the best stages along them.

=====================  ===========================================================================
units, arrange         the graph of units; where stages may end, and which device comes when
score                  the one formula for what a stage costs; `tables` have its terms for all
                       stages of an order, by `waiting` (gradients of skips), `received` (copies of
                       values) and `held` (regions)
candidate, chain       the best stages along one order
problem, model         the question without an order, and a model's own
solver                 its answer and a lower bound: the dynamic `program` over `families` of
                       downsets (`lattice`); `reduce` makes problems smaller, `interval` and
                       `windows` are for large graphs, `moves` for tight budgets
floats, float_costs    units without edges, which the solver places last; `branch` proves where
bound                  what the largest peak of no placement is below
returning, fold        devices that get several stages which are not neighbours, and what these
shared, passed_on      hold together, and for each other
labels, lighten        what to recompute and to offload in one stage; `least`: what any choice costs
describe, types        the answer, and why each boundary is where it is
=====================  ===========================================================================
"""

from placer.partition.choose import choose_partition
from placer.partition.problem import (
    CrossingValue,
    PartitionProblem,
    Solution,
    StageSlot,
    stage_loads,
)
from placer.partition.solver import solve
from placer.partition.types import Demands, DeviceSlot, Partition, PartitionStage
from placer.plan.types import Optimality

__all__ = [
    "CrossingValue",
    "Demands",
    "DeviceSlot",
    "Optimality",
    "Partition",
    "PartitionProblem",
    "PartitionStage",
    "Solution",
    "StageSlot",
    "choose_partition",
    "solve",
    "stage_loads",
]
