"""Adjust a cost table for regions that are recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placer.cost.types import CostTable
from placer.regions import RegionKey
from placer.timeline import pinned_nbytes


def with_regions(costs: CostTable, keys: Sequence[RegionKey | None]) -> CostTable:
    """``costs`` with the region key of each node.

    A recomputed node runs its forward again in backward. The bytes of an offloaded value are counted at
    the first node of each region that saves it. How regions change the bytes retained for backward depends
    on the stages; see `placer.partition.stage_cost`.
    """
    if not any(keys):
        return costs
    hosted, pinned = [0] * len(costs.nodes), [0] * len(costs.nodes)
    for value in costs.values:
        readers: dict[RegionKey, int] = {}
        for node in sorted({*value.savers, *value.users}):
            key = keys[node] if node < len(keys) else None
            if key is None or not key.offload:
                continue
            made_inside = value.producer >= 0 and keys[value.producer] == key
            waits = not made_inside if key.recompute else node in value.savers
            if waits:
                readers.setdefault(key, node)
        for node in readers.values():
            hosted[node] += value.nbytes
            pinned[node] += pinned_nbytes(value.nbytes)
    again = [i for i, key in enumerate(keys) if key is not None and key.recompute]
    nodes = tuple(
        replace(cost, host_nbytes=moved, host_pinned_nbytes=taken)
        for cost, moved, taken in zip(costs.nodes, hosted, pinned, strict=True)
    )
    work = costs.work.with_repeated(again)
    return replace(costs, nodes=nodes, work=work, keys=tuple(keys))
