"""Exchanges the statistics that norms collected on every replica, for deferred running statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from placer.executor.distributed.job.groups import gather_objects
from placer.executor.place import CALLER
from placer.executor.statistics import Moments, NormCall, join_moments


def moments_of_replicas(
    own: Mapping[NormCall, Moments], *, group: dist.ProcessGroup, copies: int
) -> dict[NormCall, Moments]:
    """The moments of all replicas' rows, in host memory, from this rank's ``own``; a collective call.

    Of ``copies`` ranks in a row of ``group``, the shards of a replica, all have the same.
    """
    on_host = {
        call: replace(each, place=CALLER, mean=each.mean.cpu(), deviations=each.deviations.cpu())
        for call, each in own.items()
    }
    replicas = gather_objects(on_host, group)[::copies]
    calls = dict.fromkeys(call for found in replicas for call in found)
    return {c: join_moments(c, (each[c] for each in replicas if c in each)) for c in calls}
