"""Regions: which nodes of a stage are recomputed in backward, or wait in host memory."""

from placer.regions.keys import find_regions, region_keys
from placer.regions.types import Region, RegionKey

__all__ = ["Region", "RegionKey", "find_regions", "region_keys"]
