"""A way to train a model on some devices: a point of the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from placer.quantities import format_count
from placer.space import MOST_CHUNKS
from placer.spec import DeviceSpec, PlacementSpec
from placer.spec.fields import ScheduleName
from placer.spec.rows import shifted_rows

SEARCHED = (
    *("replicas", "stages", "space", "microbatches", "schedule", "checkpoint", "offload", "chunks"),
    "shard_state",
)  # the fields of a spec that the search chooses where they are not given


class Family(NamedTuple):
    """The kinds of parallelism, and of saving memory, that a strategy has."""

    replicas: bool
    stages: bool
    shards: bool
    recompute: bool
    offload: bool
    chunks: bool
    shard_state: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Degrees of parallelism, and what is done to save memory.

    ``recompute``, ``offload`` and ``chunks`` say what the planner may do with a model that does not fit
    otherwise; with ``shard_state`` the optimizer's state is divided between the ranks that have the same
    weights.

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
    shard_state: bool = False

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.replicas * self.stages * self.shards

    @property
    def lighter(self) -> int:
        """How many ways of saving memory are allowed."""
        return self.recompute + self.offload + self.chunks + self.shard_state

    def with_less_help(self) -> Iterator[Strategy]:
        """The same with one way of saving memory less, for each that it has."""
        if self.recompute:
            yield replace(self, recompute=False)
        if self.offload:
            yield replace(self, offload=False)
        if self.chunks:
            yield replace(self, chunks=False)
        if self.shard_state:
            yield replace(self, shard_state=False)

    @property
    def family(self) -> Family:
        """What it has in common with strategies that differ in numbers only."""
        return Family(
            replicas=self.replicas > 1,
            stages=self.stages > 1,
            shards=self.shards > 1,
            recompute=self.recompute,
            offload=self.offload,
            chunks=self.chunks,
            shard_state=self.shard_state,
        )

    @property
    def complexity(self) -> tuple[int, ...]:
        """The order of preference among strategies that are equally good: few devices, few parts."""
        return (
            self.devices,
            self.lighter,
            self.shards,
            self.stages,
            self.microbatches,
            self.replicas,
        )

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
            "optimizer state divided": self.shard_state,
        }
        parts += [word for word, is_so in words.items() if is_so]
        return ", ".join(parts)

    def spec(self, wanted: PlacementSpec, pool: Sequence[DeviceSpec]) -> PlacementSpec | None:
        """``wanted`` with this strategy, on devices of ``pool``; None if these are too few or too unlike."""
        rows = replica_rows(
            pool, self.replicas, self.stages * self.shards, list(wanted.layers.values())
        )
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
        if self.shard_state:
            fields["shard_state"] = "optimizer"
        return wanted.model_copy(update=fields)


def replica_rows(
    pool: Sequence[DeviceSpec], replicas: int, devices: int, pinned: Sequence[str] = ()
) -> list[list[DeviceSpec]] | None:
    """The devices of each replica, which are alike in all of them; None if ``pool`` has too few such.

    Devices of one kind and memory follow one another. All ``pinned`` devices must be in the first row.
    """
    if replicas == 1:
        rows = [list(pool[:devices])]
    else:
        groups: dict[DeviceSpec, list[DeviceSpec]] = {}
        for device in pool:
            groups.setdefault(device.model_copy(update={"name": pool[0].name}), []).append(device)
        rows = [[] for _ in range(replicas)]
        for alike in groups.values():
            each = min(len(alike) // replicas, devices - len(rows[0]))
            for index, row in enumerate(rows):
                row += alike[index * each : (index + 1) * each]
    if len(rows[0]) < devices or not set(pinned) <= {device.name for device in rows[0]}:
        return None
    return rows


def degrees(total: int, most: int) -> Iterator[int]:
    """The numbers up to ``most`` that are tried: all that are small, and those that divide ``total`` well."""
    for number in range(1, most + 1):
        if number <= 8 or number == total // max(1, total // number):
            yield number
