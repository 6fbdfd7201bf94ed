"""Regions: which nodes of a stage are recomputed in backward, or wait in host memory."""

from placer.regions.keys import cuttable_nodes, find_regions, region_keys, whole_groups
from placer.regions.types import Region, RegionKey

__all__ = [
    "Region",
    "RegionKey",
    "cuttable_nodes",
    "find_regions",
    "region_keys",
    "whole_groups",
]
