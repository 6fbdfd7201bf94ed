"""Regions: which nodes of a stage are recomputed in backward, or wait in host memory."""

from placer.regions.keys import find_regions, region_boundaries, region_keys, whole_groups
from placer.regions.types import Region, RegionBoundaries, RegionKey

__all__ = [
    "Region",
    "RegionBoundaries",
    "RegionKey",
    "find_regions",
    "region_boundaries",
    "region_keys",
    "whole_groups",
]
