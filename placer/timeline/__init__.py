"""Timeline: what a device is given and gives back during a training step, in order; nothing of torch.

A peak is a sweep over it (`Timeline.peaks`), and so is what torch's allocator reserves of the driver
for it (`placer.timeline.allocator`), and what the host has for what waits there (`placer.timeline.host`).
"""

from placer.timeline.allocator import CachingAllocator, OutOfMemory, Usage, device_usage
from placer.timeline.host import PINNED, HostUsage, host_usage, pinned_nbytes
from placer.timeline.repeat import repeat_parts
from placer.timeline.types import Block, Event, Moment, Recorder, Timeline, Where

__all__ = [
    "PINNED",
    "Block",
    "CachingAllocator",
    "Event",
    "HostUsage",
    "Moment",
    "OutOfMemory",
    "Recorder",
    "Timeline",
    "Usage",
    "Where",
    "device_usage",
    "host_usage",
    "pinned_nbytes",
    "repeat_parts",
]
