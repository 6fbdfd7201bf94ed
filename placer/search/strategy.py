"""A way to train a model on some devices: a point of the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from placer.quantities import format_count
from placer.space import MOST_CHUNKS
from placer.spec import DeviceSpec, PlacementSpec
from placer.spec.fields import ScheduleName
from placer.spec.rows import shifted_rows
from placer.state_layout import ShardState

# The fields of a spec that the search chooses where they are not given
SEARCHED = (
    "replicas", "stages", "space", "microbatches", "schedule", "checkpoint", "offload", "chunks",
    "shard_state", "node_layout",
)  # fmt: skip
_HELP = ("recompute", "offload", "chunks")  # ways of saving memory, besides dividing state
STATES: tuple[ShardState, ...] = get_args(ShardState)  # from none to all that can be divided


class Family(NamedTuple):
    """The kinds of parallelism, and of saving memory, that a strategy has."""

    replicas: bool
    stages: bool
    shards: bool
    recompute: bool
    offload: bool
    chunks: bool
    shard_state: ShardState


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Degrees of parallelism, and what is done to save memory.

    ``recompute``, ``offload`` and ``chunks`` say what the planner may do with a model that does not fit
    otherwise; ``shard_state`` says what the ranks that have the same weights divide between them.

    >>> Strategy(replicas=2, stages=2, microbatches=4, schedule="1F1B", recompute=True).describe()
    '2 replicas x 2 stages, 4 micro-batches (1F1B), recomputing'
    """

    replicas: int = 1
    stages: int = 1
    shards: int = 1
    microbatches: int = 1
    schedule: ScheduleName = "GPipe"
    recompute: bool = False
    offload: bool = False
    chunks: bool = False
    shard_state: ShardState = "none"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.replicas * self.stages * self.shards

    @property
    def lighter(self) -> int:
        """How many ways of saving memory are allowed."""
        ways = [getattr(self, way) for way in _HELP]
        return ways.count(True) + STATES.index(self.shard_state)

    def with_less_help(self) -> Iterator[Strategy]:
        """The same with one way of saving memory less, for each that it has and that costs time."""
        for way in _HELP:
            if getattr(self, way):
                changed: dict[str, Any] = {way: False}
                yield replace(self, **changed)
        if self.shard_state == "gradients":  # dividing the optimizer's state saves time, too
            yield replace(self, shard_state="optimizer")

    @property
    def family(self) -> Family:
        """What it has in common with strategies that differ in numbers only."""
        return Family(
            replicas=self.replicas > 1,
            stages=self.stages > 1,
            shards=self.shards > 1,
            shard_state=self.shard_state,
            **{way: getattr(self, way) for way in _HELP},
        )

    @property
    def complexity(self) -> tuple[int, ...]:
        """The order of preference among strategies that are equally good: few devices, few parts."""
        parts = self.shards, self.stages, self.microbatches, self.replicas
        return self.devices, self.lighter, *parts

    def describe(self) -> str:
        """One line, in the words of the glossary."""
        counts = ((self.replicas, "replica"), (self.stages, "stage"), (self.shards, "shard"))
        degrees = [format_count(count, what) for count, what in counts if count > 1]
        parts = [" x ".join(degrees) or "one device"]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} micro-batches ({self.schedule})")
        words = {
            "recomputing": self.recompute,
            "offloading": self.offload,
            "in chunks": self.chunks,
            "optimizer state divided": self.shard_state == "optimizer",
            "gradients and optimizer state divided": self.shard_state == "gradients",
        }
        parts += [word for word, is_so in words.items() if is_so]
        return ", ".join(parts)

    def spec(self, wanted: PlacementSpec, pool: Pool) -> PlacementSpec | None:
        """``wanted`` with this strategy, on devices of ``pool``; None if these are too few or too unlike."""
        rows = pool.rows(self.replicas, self.stages * self.shards, list(wanted.layers.values()))
        if rows is None:
            return None
        names = [[device.name for device in row] for row in rows]
        shifted = shifted_rows(names[0], self.replicas) == names
        fields: dict[str, Any] = {
            "devices": tuple(rows[0]),
            "replicas": self.replicas,
            "replica_devices": () if shifted else tuple(tuple(row) for row in names[1:]),
            "microbatches": self.microbatches,
            "schedule": self.schedule,
        }
        if "node_layout" not in wanted.model_fields_set:
            fields["node_layout"] = "auto"
        fields["stages"] = self.stages if wanted.machine is not None else "auto"
        space = wanted.space
        if space.shards != self.shards:
            fields["space"] = space.model_copy(update={"shards": self.shards})
        # Patterns that the user gave stay as they are.
        if self.recompute or wanted.checkpoint == "auto":
            fields["checkpoint"] = "auto" if self.recompute else ()
        if self.offload or wanted.offload == "auto":
            fields["offload"] = "auto" if self.offload else ()
        if self.chunks or wanted.chunks == "auto":
            fields["chunks"] = MOST_CHUNKS if self.chunks else 1
        if self.shard_state != "none" or wanted.shard_state == "auto":
            fields["shard_state"] = self.shard_state
        return wanted.model_copy(update=fields)


class Pool:
    """The devices that strategies may use. Those of one kind and memory form a group."""

    def __init__(self, devices: Sequence[DeviceSpec]) -> None:
        self._devices = devices
        groups: dict[tuple[object, ...], list[DeviceSpec]] = {}
        for device in devices:
            alike = tuple(value for field, value in device if field != "name")
            groups.setdefault(alike, []).append(device)
        self._groups = list(groups.values())

    def has_rows(self, replicas: int, devices: int) -> bool:
        """Are there so many replicas with so many devices each, alike in all of them?"""
        if replicas == 1:
            return devices <= len(self._devices)
        return devices <= sum(len(alike) // replicas for alike in self._groups)

    def rows(
        self, replicas: int, devices: int, pinned: Sequence[str] = ()
    ) -> list[list[DeviceSpec]] | None:
        """The devices of each replica, which are alike in all of them; None if there are too few such.

        Devices of one group follow one another. All ``pinned`` devices must be in the first row.
        """
        if not self.has_rows(replicas, devices):
            return None
        if replicas == 1:
            rows = [list(self._devices[:devices])]
        else:
            rows = [[] for _ in range(replicas)]
            for alike in self._groups:
                each = min(len(alike) // replicas, devices - len(rows[0]))
                for index, row in enumerate(rows):
                    row += alike[index * each : (index + 1) * each]
        return rows if set(pinned) <= {device.name for device in rows[0]} else None


def degrees(most: int) -> Iterator[int]:
    """The numbers of stages up to ``most`` that are tried: all small ones, and larger ones a sixteenth apart.

    >>> list(degrees(20)), len(list(degrees(10_000)))
    ([20, 18, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1], 110)
    """
    number = most
    while number > 0:
        yield number
        number = min(number - 1, number * 15 // 16)
