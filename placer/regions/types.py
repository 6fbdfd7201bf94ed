"""Regions: neighbouring nodes of a stage whose saved activations are recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionKey:
    """What happens to the activations that a node saves. Neighbours with equal keys form one region.

    With ``recompute``, only the inputs of the region are kept, and backward runs its forward again. With
    ``offload``, the kept tensors are in host memory until backward. ``label``, such as a layer's path,
    distinguishes neighbouring regions.
    """

    label: str
    recompute: bool
    offload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The nodes of a stage from ``first`` to ``last``, in the stage's order; see `RegionKey`.

    ``overlapped``: offloaded tensors are copied on a separate CUDA stream while kernels run.
    """

    first: str
    last: str
    recompute: bool
    offload: bool
    overlapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBoundaries:
    """Positions of nodes, in the program's order, before which regions may begin or end.

    Any region may begin and end before a position in ``free``. A recomputed region may end before a
    position in ``ending`` if it begins at ``ending[position]`` or earlier, and if no node from the
    position to the next free one is recomputed. Nodes in ``unsafe`` must not be in a region.
    """

    free: frozenset[int]
    ending: Mapping[int, int]
    unsafe: frozenset[int]
