"""What the offloaded activations of a partition take of the host's memory."""

from __future__ import annotations

from placer.cost import CostTable, device_type
from placer.partition import Partition, PlanningOptions
from placer.partition.candidate import in_flight_at
from placer.timeline import HostUsage

HOST_NAME = "host"  # among the names of devices


def estimate_host(costs: CostTable, partition: Partition, options: PlanningOptions) -> HostUsage:
    """What waits on the host in a step of one replica, if every stage's micro-batches do so at once.

    Those are the ones in flight. What comes from a CUDA device waits in pinned memory.
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
