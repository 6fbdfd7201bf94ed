"""Regions: which nodes of a stage are recomputed in backward, or wait in host memory."""

from placer.regions.keys import find_regions, region_borders, region_keys, whole_groups
from placer.regions.types import Region, RegionBorders, RegionKey

__all__ = [
    "Region",
    "RegionBorders",
    "RegionKey",
    "find_regions",
    "region_borders",
    "region_keys",
    "whole_groups",
]
