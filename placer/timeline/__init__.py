"""Timeline: what happens on devices during a training step, in order; nothing of torch.

Bytes: `Timeline` has what a device is given and gives back. A peak is a sweep over it
(`Timeline.peaks`), and so is what torch's allocator reserves of the driver for it
(`placer.timeline.allocator`), and what the host has for what waits there (`placer.timeline.host`).
Seconds: a `Clock` says when each computation and transfer runs (`placer.plan.step_spans` has those of a
plan's step).
"""

from placer.timeline.allocator import CachingAllocator, OutOfMemory, Usage, device_usage
from placer.timeline.clock import Clock, Span, end_of, idle_share
from placer.timeline.host import PINNED, HostUsage, host_usage, pinned_nbytes
from placer.timeline.repeat import repeat_parts
from placer.timeline.types import Block, Event, Moment, Recorder, Timeline, Where

__all__ = [
    "PINNED",
    "Block",
    "CachingAllocator",
    "Clock",
    "Event",
    "HostUsage",
    "Moment",
    "OutOfMemory",
    "Recorder",
    "Span",
    "Timeline",
    "Usage",
    "Where",
    "device_usage",
    "end_of",
    "host_usage",
    "idle_share",
    "pinned_nbytes",
    "repeat_parts",
]
