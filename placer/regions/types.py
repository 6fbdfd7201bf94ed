"""A region: neighbouring nodes of a stage whose saved activations are not simply kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionKey:
    """What is done with a node's saved activations; neighbours with equal keys are one region.

    With ``recompute`` only what the region reads is kept, and backward runs its forward again.
    With ``offload`` what is kept waits in host memory. ``label`` (a layer's path) tells regions
    apart that lie side by side.
    """

    label: str
    recompute: bool
    offload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A run of nodes of one stage, from ``first`` to ``last`` in the stage's order; see `RegionKey`."""

    first: str
    last: str
    recompute: bool
    offload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBoundaries:
    """Positions of nodes, in the capture's order, before which regions may begin or end.

    At those in ``free`` they may do both; at those in ``ending`` a recomputed region may end that
    begins no later than the position given, where what follows is not recomputed up to the next
    free one. The nodes in ``unsafe`` are in no region.
    """

    free: frozenset[int]
    ending: Mapping[int, int]
    unsafe: frozenset[int]
