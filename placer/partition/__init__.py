"""Chooses which operations run on which device: searches for the best stages of a captured model.

`choose_partition` tries several orders of the model's operations, and finds the best stages along each
by dynamic programming over cuts: the positions at which a stage may end. A unit is a group of
operations that must stay on one stage; a boundary is where one chosen stage ends and the next begins.

==========================  ======================================================================
choose                      the entry point; tries several orders
units, arrange              the graph of units; cuts along an order, and orders of devices
candidate, chain            the best stages along one order
steps                       steps laid out in time, to move boundaries to where they are shortest
noncontiguous, assignment   several stages on one device, which need not be neighbours
rectangles                  sums of constants over tables, for all stages along an order
model                       expresses a captured model as a problem of `solver`
describe, types             the result, with the best alternative for each boundary
`stage_cost`                the bytes and seconds of a stage
`solver`                    placements over all orders
`policy`                    chooses what to recompute and offload in one stage
==========================  ======================================================================
"""

from placer.partition.choose import choose_partition, rate_partition
from placer.partition.solver.problem import PartitionProblem, SharedValue, StageSlot, stage_loads
from placer.partition.solver.solve import solve
from placer.partition.stage_cost.cache import TableCache
from placer.partition.types import MANY_STAGES, DeviceSlot, Partition, PlanningOptions
from placer.plan.types import Optimality
