"""Estimates the host memory that a partition's offloaded activations take."""

from __future__ import annotations

from placer.cost import CostTable
from placer.machine.devices import device_type
from placer.partition import Partition, PlanningOptions
from placer.partition.candidate import in_flight_at
from placer.timeline import HostUsage

HOST_NAME = "host"  # the host's name where devices are listed by name


def estimate_host(costs: CostTable, partition: Partition, options: PlanningOptions) -> HostUsage:
    """The host memory of one replica, in bytes, when every stage has its most micro-batches in flight.

    Tensors offloaded from a CUDA device are in pinned memory, whose sizes torch rounds up.
    """
    position = {name: i for i, name in enumerate(costs.names)}
    usage = HostUsage()
    stages = partition.stages
    for index, (stage, slot) in enumerate(zip(stages, partition.slots, strict=True)):
        nodes = [costs.nodes[position[name]] for name in stage.nodes]
        moved = sum(node.host_nbytes for node in nodes)
        pinned = device_type(slot.name) == "cuda"
        taken = sum(node.host_pinned_nbytes for node in nodes) if pinned else moved
        count = in_flight_at(options, len(stages), index).most
        usage += HostUsage(round(count * moved), round(count * taken))
    return usage
