"""Memory events of a training step on its devices, and the sweep over them that finds the peaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from placer.schedule import Action


class Task(NamedTuple):
    """What a process does at a moment of a step: an action of a replica, or the optimizer's step (None).

    Memory events and spans of one step that have the same task belong together.
    """

    action: Action | None = None
    replica: int = 0


OPTIMIZER = Task()

MEMORY_KINDS = ("weights", "optimizer", "activations", "gradients", "received", "temporary")
"""What readers are shown of the kinds of blocks, the longest-lived first."""
_MEMORY_KIND = {
    **dict.fromkeys(("parameter", "buffer"), "weights"),
    "optimizer": "optimizer",
    **dict.fromkeys(("forward", "recompute"), "activations"),
    "backward": "gradients",
    **dict.fromkeys(("input", "received", "pinned"), "received"),
}


def memory_kind(kind: str) -> str:
    """Which of `MEMORY_KINDS` blocks of a kind are."""
    return _MEMORY_KIND.get(kind, "temporary")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPosition:
    """A point in a step: the phase, and the node and layer that are running ("" outside stages)."""

    phase: str = ""  # "forward", "backward", "recompute" (a forward again), "optimizer"
    node: str = ""
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory allocated for a storage or a workspace; ``nbytes`` is the size requested.

    ``operation`` is the ATen operation that allocated it, at the point ``where`` of the step. A
    "workspace" is memory that a kernel needs while it runs. If there is no room for an ``elastic`` one, a
    slower kernel runs that does not need it.
    """

    device: str
    nbytes: int
    # "parameter", "buffer", "input", "received" (a copy from another place), "pinned" (a copy from a CUDA
    # device in pinned memory), "temporary", "workspace", or the phase
    kind: str
    name: str  # of the parameter or buffer (also for its optimizer state), otherwise of the node
    layer: str
    shape: tuple[int, ...]
    where: StepPosition = field(default_factory=StepPosition)
    operation: str = ""
    elastic: bool = False


class Event(NamedTuple):
    """A block is allocated, freed, or read by a backward for which forward saved it.

    ``block`` is its index in `Timeline.blocks`; ``task`` is what the process does, None if that is neither an
    action nor the optimizer's step. Reads are only in recordings of a captured model's nodes, which the costs
    of the nodes are derived from; those have no tasks.
    """

    kind: Literal["allocate", "free", "read"]
    block: int
    task: Task | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a device's peak: its bytes, the point in the step, and the number of events so far."""

    nbytes: int = 0
    where: StepPosition = field(default_factory=StepPosition)
    operation: str = ""
    events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The blocks that every device allocates and frees in one or more steps, in order."""

    blocks: Sequence[Block]
    events: Sequence[Event]

    def on(self, device: str) -> Iterator[Event]:
        """The events of ``device``."""
        return (event for event in self.events if self.blocks[event.block].device == device)

    def by_device(self) -> Mapping[str, Timeline]:
        """The timeline of each device, with only its events, which is faster to read several times."""
        events = defaultdict[str, list[Event]](list)
        for event in self.events:
            events[self.blocks[event.block].device].append(event)
        return {name: Timeline(blocks=self.blocks, events=own) for name, own in events.items()}

    def peaks(self, *, workspaces: bool = False) -> Mapping[str, Moment]:
        """The first moment at which each device has the most bytes; O(events) time.

        Counts tensors, and with ``workspaces`` also workspaces.
        """
        live: dict[str, int] = {}
        found: dict[str, tuple[int, Block, int]] = {}  # the most bytes, the last block, its event
        for number, (kind, index, _) in enumerate(self.events, start=1):
            block = self.blocks[index]
            if kind == "read" or (block.kind == "workspace" and not workspaces):
                continue
            device = block.device
            if kind == "free":
                live[device] -= block.nbytes
                continue
            now = live[device] = live.get(device, 0) + block.nbytes
            if device not in found or now > found[device][0]:
                found[device] = now, block, number
        return {
            device: Moment(nbytes=most, where=b.where, operation=b.operation, events=number)
            for device, (most, b, number) in found.items()
        }

    def live(self, device: str, moment: Moment) -> list[Block]:
        """The tensors that are alive on ``device`` at ``moment``, the largest first."""
        live: dict[int, None] = {}
        for event in self.events[: moment.events]:
            if event.kind == "free":
                live.pop(event.block, None)
            elif event.kind == "allocate":
                live[event.block] = None
        blocks = (self.blocks[i] for i in live)
        found = [b for b in blocks if b.device == device and b.kind != "workspace"]
        return sorted(found, key=lambda block: -block.nbytes)

    def kept(self) -> Mapping[int, Block]:
        """The blocks that are never freed, by number."""
        freed = {event.block for event in self.events if event.kind == "free"}
        return {i: block for i, block in enumerate(self.blocks) if i not in freed}


class Recorder:
    """Records a timeline while a step runs; ``task()`` returns what the process does."""

    def __init__(self, task: Callable[[], Task | None] = lambda: None) -> None:
        self._task = task
        self.blocks: list[Block] = []
        self._events: list[Event] = []

    def allocate(self, block: Block) -> int:
        """Record the allocation of ``block``; returns its number, for `free`."""
        self.blocks.append(block)
        self._events.append(Event("allocate", len(self.blocks) - 1, self._task()))
        return len(self.blocks) - 1

    def free(self, number: int) -> None:
        """Record that the block with this number is freed."""
        self._events.append(Event("free", number, self._task()))

    def read(self, number: int) -> None:
        """Record that a backward reads the block with this number."""
        self._events.append(Event("read", number, self._task()))

    @property
    def num_events(self) -> int:
        """The number of events so far."""
        return len(self._events)

    def timeline(self) -> Timeline:
        """The timeline of all events so far."""
        return Timeline(blocks=tuple(self.blocks), events=tuple(self._events))
