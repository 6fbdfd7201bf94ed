"""Regions: neighbouring nodes whose activations are recomputed in backward, or offloaded to the host."""

from placer.regions.keys import (
    find_regions,
    region_boundaries,
    region_keys,
    whole_groups,
    with_overlap,
)
from placer.regions.types import Region, RegionBoundaries, RegionKey
