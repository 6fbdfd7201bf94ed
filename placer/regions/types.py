"""Regions: neighbouring nodes of a stage whose saved activations are recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionKey:
    """What is done with the activations that a node saves; neighbours with equal keys are one region.

    With ``recompute`` only the inputs of the region are kept, and backward runs its forward again.
    With ``offload`` what is kept is in host memory until backward. ``label`` (a layer's path) is
    different for neighbouring regions.
    """

    label: str
    recompute: bool
    offload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The nodes of a stage from ``first`` to ``last``, in the stage's order; see `RegionKey`.

    ``overlapped``: what is offloaded is copied beside the kernels, on a CUDA stream of its own.
    """

    first: str
    last: str
    recompute: bool
    offload: bool
    overlapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBoundaries:
    """Positions of nodes, in the program's order, before which regions may begin or end.

    Before those in ``free`` they may begin and end. Before a position in ``ending`` a recomputed region
    may end, if it begins at the position given there or earlier, and if nothing from there to the next
    free position is recomputed. Nodes in ``unsafe`` must not be in a region.
    """

    free: frozenset[int]
    ending: Mapping[int, int]
    unsafe: frozenset[int]
