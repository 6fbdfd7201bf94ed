"""The timeline of a training step on its devices: memory that is allocated and freed, and time.

`Timeline` has the blocks of memory that each device allocates and frees, in order. Sweeps over it find
the peak (`Timeline.peaks`), what torch's allocator reserves (`placer.timeline.allocator`), and the host
memory of offloaded activations (`placer.timeline.host`). `run` finds when each computation and transfer
runs; `placer.plan.step_spans` has those of a plan's step. Nothing here imports torch.
"""

from placer.timeline.allocator import CachingAllocator, OutOfMemory, Usage, device_usage
from placer.timeline.clock import Operation, Span, end_of, idle_share, run
from placer.timeline.host import PINNED, HostUsage, host_usage, pinned_nbytes
from placer.timeline.repeat import rename_nodes, repeat_parts
from placer.timeline.types import (
    MEMORY_KINDS,
    OPTIMIZER,
    Block,
    Event,
    Moment,
    Recorder,
    StepPosition,
    Task,
    Timeline,
    memory_kind,
)
