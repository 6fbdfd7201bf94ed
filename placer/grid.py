"""The ranks of a job as a grid of replicas x devices of a replica x shards, with one numbering.

Every rank, coordinate and group of ranks comes from here. The model is torchtitan's ``ParallelDims``: one
value owns every degree and the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["dp", "pp", "sp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "sp")


class Coordinates(NamedTuple):
    """Where a rank is: its replica, its device of the replica, and its shard."""

    dp: int
    pp: int
    sp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """``replicas`` x ``devices`` x ``shards`` ranks, numbered along ``order``, whose last axis is inner.

    >>> grid = Grid(replicas=2, devices=3)
    >>> grid.rank(dp=1, pp=2)
    5
    >>> grid.groups("pp")
    [(0, 1, 2), (3, 4, 5)]
    >>> grid.groups("dp")
    [(0, 3), (1, 4), (2, 5)]
    """

    replicas: int = 1
    devices: int = 1
    shards: int = 1
    order: tuple[Axis, ...] = AXES

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis, along ``order``."""
        sizes = {"dp": self.replicas, "pp": self.devices, "sp": self.shards}
        return tuple(sizes[axis] for axis in self.order)

    def rank(self, *, dp: int = 0, pp: int = 0, sp: int = 0) -> int:
        """The rank at these coordinates."""
        found, at = 0, {"dp": dp, "pp": pp, "sp": sp}
        for axis, size in zip(self.order, self.shape, strict=True):
            found = found * size + at[axis]
        return found

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of ``rank``. Raises ``ValueError`` if the grid has no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in 0 … {self.size - 1}")
        at: dict[Axis, int] = {}
        for axis, size in zip(reversed(self.order), reversed(self.shape), strict=True):
            rank, at[axis] = divmod(rank, size)
        return Coordinates(**at)

    def groups(self, *axes: Axis, size: int | None = None) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in ``axes`` only, in order of their first ranks.

        With ``size``, each group is cut into groups of so many ranks; the last one may have fewer.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)
            key = tuple(getattr(at, axis) for axis in AXES if axis not in axes)
            found.setdefault(key, []).append(rank)
        groups = sorted(found.values())
        if size is None:
            return [tuple(group) for group in groups]
        return [tuple(group[i : i + size]) for group in groups for i in range(0, len(group), size)]

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` in ``axes`` only, and ``rank`` itself."""
        return next(group for group in self.groups(*axes) if rank in group)

    def ranks_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The ranks of these devices in all replicas and shards."""
        axes = itertools.product(range(self.replicas), devices, range(self.shards))
        return tuple(sorted(self.rank(dp=r, pp=d, sp=s) for r, d, s in axes))
