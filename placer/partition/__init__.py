"""Partition: costs, devices and pins in, stages on devices out."""

from placer.partition.choose import choose_partition
from placer.partition.types import Demands, DeviceSlot, Partition, PartitionStage

__all__ = ["Demands", "DeviceSlot", "Partition", "PartitionStage", "choose_partition"]
