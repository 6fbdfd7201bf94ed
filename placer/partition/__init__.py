"""Partition: costs, devices and pins in, stages on devices out."""

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
