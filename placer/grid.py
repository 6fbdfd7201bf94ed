"""The ranks of a job as a grid of replicas x devices of a replica x shards, and their numbering.

Every rank, coordinate and group of ranks comes from here. The model is torchtitan's ``ParallelDims``: one
value owns every degree and the mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["dp", "pp", "sp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "sp")
NodeLayout = Literal["stages", "replicas"]


class Coordinates(NamedTuple):
    """Where a rank is: its replica, its device of the replica, and its shard."""

    dp: int
    pp: int
    sp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """``replicas`` x ``devices`` x ``shards`` ranks; those of shards are neighbours.

    Ranks fill one node after the other. With the ``node_layout`` "stages", the devices of a replica, which
    send each other activations, are next to each other; with "replicas" those of the same stage in all
    replicas, which sum gradients.

    >>> grid = Grid(replicas=2, devices=3)
    >>> grid.rank(dp=1, pp=2)
    5
    >>> grid.groups("pp")
    [(0, 1, 2), (3, 4, 5)]
    >>> grid.groups("dp")
    [(0, 3), (1, 4), (2, 5)]
    >>> Grid(replicas=2, devices=3, node_layout="replicas").groups("dp")
    [(0, 1), (2, 3), (4, 5)]
    """

    replicas: int = 1
    devices: int = 1
    shards: int = 1
    node_layout: NodeLayout = "stages"

    @property
    def stride(self) -> int:
        """How far apart the copies of a stage are, with all shards of a device counted as one."""
        return self.devices if self.node_layout == "stages" else 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.replicas * self.devices * self.shards

    def rank(self, *, dp: int = 0, pp: int = 0, sp: int = 0) -> int:
        """The rank at these coordinates."""
        at = dp * self.devices + pp if self.node_layout == "stages" else pp * self.replicas + dp
        return at * self.shards + sp

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of ``rank``. Raises ``ValueError`` if the grid has no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in 0 … {self.size - 1}")
        rest, sp = divmod(rank, self.shards)
        if self.node_layout == "stages":
            return Coordinates(*divmod(rest, self.devices), sp)
        pp, dp = divmod(rest, self.replicas)
        return Coordinates(dp, pp, sp)

    @property
    def has_layouts(self) -> bool:
        """Does the numbering depend on ``node_layout``?"""
        return self.replicas > 1 and self.devices > 1

    def groups(self, *axes: Axis, replicas: int | None = None) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in ``axes`` only, in order of their first ranks.

        With ``replicas`` a group has so many neighbouring ones at most.

        >>> Grid(replicas=4).groups("dp", replicas=2)
        [(0, 1), (2, 3)]
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)
            key = (
                at.dp // (replicas or self.replicas),
                *(getattr(at, axis) for axis in AXES if axis not in axes),
            )
            found.setdefault(key, []).append(rank)
        return sorted(tuple(group) for group in found.values())

    def ranks_of(
        self, devices: Sequence[int], replicas: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """The ranks of these devices in all shards, and in ``replicas`` or all of them."""
        if replicas is None:
            replicas = range(self.replicas)
        axes = itertools.product(replicas, devices, range(self.shards))
        return tuple(sorted(self.rank(dp=r, pp=d, sp=s) for r, d, s in axes))
