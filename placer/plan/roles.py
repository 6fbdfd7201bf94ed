"""Writes the devices of a plan as roles with counts, and reads them again: most replicas need the same.

A role is what devices do that run the same stages, and the same shard of them, in some replicas::

    {"stage": 0, "shard": 0, "count": 256, "memory": {"peak": 79783072792, …}}

``stage`` is the first of their stages, and ``count`` is the number of replicas, which follow one another. If
the devices of other replicas follow from those of the first one by `shifted_rows`, stages list only these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from placer.schedule import ranks_of
from placer.spec.rows import shifted_rows


def with_roles(values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON ``values`` of a plan with ``roles`` instead of ``devices``."""
    names = _Names(values)
    roles = []
    for at, place in enumerate(names.places):
        column = values["devices"][at :: len(names.places)]
        memories = [{key: peak[key] for key in peak if key != "device"} for peak in column]
        for memory, replicas in itertools.groupby(memories):
            roles.append({**place, "count": len(list(replicas)), "memory": memory})
    stages = values["stages"]
    if [stage["devices"] for stage in stages] == names.of_stages(names.shifted):
        first = names.of_stages(names.shifted[:1])
        stages = [{**s, "devices": own} for s, own in zip(stages, first, strict=True)]
    changed = {**values, "stages": stages, "devices": roles}
    return {"roles" if key == "devices" else key: value for key, value in changed.items()}


def with_devices(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `with_roles`; raises ``LookupError`` or ``ValueError`` for other ``values``."""
    names = _Names(values)
    columns = []
    for place in names.places:
        same = [role for role in values["roles"] if place.items() <= role.items()]
        columns.append([role["memory"] for role in same for _ in range(role["count"])])
    rows = names.rows
    devices = [
        {"device": name, **memory}
        for row, memories in zip(rows, zip(*columns, strict=True), strict=True)
        for name, memory in zip(row, memories, strict=True)
    ]
    named = names.of_stages(rows)
    stages = [{**s, "devices": own} for s, own in zip(values["stages"], named, strict=True)]
    changed = {**values, "stages": stages, "roles": devices}
    return {"devices" if key == "roles" else key: value for key, value in changed.items()}


class _Names:
    """The names of the devices of each replica, in the order of `Plan.devices`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._shards: int = values["shards"]
        self._listed: list[list[str]] = [stage["devices"] for stage in values["stages"]]
        self._device_of = ranks_of([listed[0] for listed in self._listed])
        first_stages = [self._device_of.index(i) for i in range(max(self._device_of) + 1)]
        shards = range(self._shards)
        self.places = [
            {"stage": stage, "shard": shard} for stage in first_stages for shard in shards
        ]
        row = [self._listed[place["stage"]][place["shard"]] for place in self.places]
        # As they follow from the first replica
        self.shifted: Sequence[Sequence[str]] = shifted_rows(row, values["replicas"])

    @property
    def rows(self) -> Sequence[Sequence[str]]:
        """As they are listed, or follow if only the first replica is."""
        if len(self._listed[0]) == self._shards:
            return self.shifted
        starts = range(0, len(self._listed[0]), self._shards)
        return [
            [self._listed[place["stage"]][start + place["shard"]] for place in self.places]
            for start in starts
        ]

    def of_stages(self, rows: Sequence[Sequence[str]]) -> list[list[str]]:
        """For each stage the names of its devices in ``rows``."""
        shards = self._shards
        return [
            [name for row in rows for name in row[device * shards : (device + 1) * shards]]
            for device in self._device_of
        ]
