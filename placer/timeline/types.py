"""The events of a step on its devices, and the sweep that finds the peaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A point in a step: the phase, and the node and layer that run ("" between stages)."""

    phase: str = ""  # "forward", "backward", "recompute" (a forward again), "optimizer"
    node: str = ""
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory for one storage: its device, its bytes as asked for, and what it was made for.

    ``operation`` is the ATen operation that made it, at the point ``where`` of the step. A "workspace"
    is no tensor but what a kernel works in; where there is no room for an ``elastic`` one, a slower
    kernel runs that does without.
    """

    device: str
    nbytes: int
    # "parameter", "buffer", "input", "received" (a copy), "pinned" (the host's copy of a CUDA device's),
    # "temporary", "workspace", or the phase
    kind: str
    name: str  # of the parameter or buffer (its optimizer's state, too), else of the node
    layer: str
    shape: tuple[int, ...]
    where: Where = field(default_factory=Where)
    operation: str = ""
    elastic: bool = False


class Event(NamedTuple):
    """A block that comes or goes; ``block`` is its place in `Timeline.blocks`."""

    kind: Literal["allocate", "free"]
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a device holds the most: its bytes, where the step is, and how many events have been."""

    nbytes: int = 0
    where: Where = field(default_factory=Where)
    operation: str = ""
    events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What every device is given and gives back, in the order of the step (or of several)."""

    blocks: Sequence[Block]
    events: Sequence[Event]

    def on(self, device: str) -> Iterator[Event]:
        """The events of ``device``."""
        return (event for event in self.events if self.blocks[event.block].device == device)

    def only(self, device: str) -> Timeline:
        """The same with the events of ``device`` alone, for who looks at them several times."""
        return Timeline(blocks=self.blocks, events=tuple(self.on(device)))

    def peaks(self, *, workspaces: bool = False) -> Mapping[str, Moment]:
        """Per device the first moment at which it holds the most; O(events).

        Of tensors, and with ``workspaces`` of those, too.
        """
        live: dict[str, int] = {}
        peaks: dict[str, Moment] = {}
        for number, event in enumerate(self.events, start=1):
            block = self.blocks[event.block]
            if block.kind == "workspace" and not workspaces:
                continue
            if event.kind == "free":
                live[block.device] -= block.nbytes
                continue
            now = live[block.device] = live.get(block.device, 0) + block.nbytes
            if block.device not in peaks or now > peaks[block.device].nbytes:
                peaks[block.device] = Moment(
                    nbytes=now, where=block.where, operation=block.operation, events=number
                )
        return peaks

    def live(self, device: str, moment: Moment) -> list[Block]:
        """The tensors that ``device`` holds at ``moment``, the largest first."""
        held: dict[int, None] = {}
        for event in self.events[: moment.events]:
            if event.kind == "free":
                held.pop(event.block, None)
            else:
                held[event.block] = None
        blocks = (self.blocks[i] for i in held)
        found = [b for b in blocks if b.device == device and b.kind != "workspace"]
        return sorted(found, key=lambda block: -block.nbytes)


class Recorder:
    """Writes a timeline while a step runs."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._events: list[Event] = []

    def allocate(self, block: Block) -> int:
        """``block`` is there from now on; its number, for `free`."""
        self.blocks.append(block)
        self._events.append(Event("allocate", len(self.blocks) - 1))
        return len(self.blocks) - 1

    def free(self, number: int) -> None:
        """The block with this number is given back."""
        self._events.append(Event("free", number))

    @property
    def num_events(self) -> int:
        """How many events there have been."""
        return len(self._events)

    def timeline(self) -> Timeline:
        """What has been recorded so far."""
        return Timeline(blocks=tuple(self.blocks), events=tuple(self._events))
