"""Finds how much memory a timeline needs: tensors, workspaces, and what torch's allocator reserves."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import NamedTuple

from placer.plan.types import DevicePeak, HostPeak, Plan
from placer.timeline import HostUsage, Moment, Timeline, Usage, device_usage

_STEPS, _CACHED_STEPS = 2, 3
_PRECISION = 1 / 256  # relative, of the least memory with which the steps run


class DeviceTimeline(NamedTuple):
    """The timeline of a plan's steps on one device, whose name in the timeline is ``place``.

    ``usages`` is a cache of what the allocator does; see `with_shared_usages`.
    """

    timeline: Timeline
    place: str
    usages: dict[tuple[bool, int | None], Usage] | None = None


def with_shared_usages(runs: Iterable[DeviceTimeline]) -> list[DeviceTimeline]:
    """``runs`` with caches, which devices share that allocate and free the same sizes in the same order."""
    caches: dict[Hashable, dict[tuple[bool, int | None], Usage]] = {}
    return [run._replace(usages=caches.setdefault(_sizes(run), {})) for run in runs]


def _sizes(run: DeviceTimeline) -> Hashable:
    number: dict[int, int] = {}
    events = []
    for event in run.timeline.on(run.place):
        block = run.timeline.blocks[event.block]
        same = number.setdefault(event.block, len(number))
        events.append((event.kind, same, block.nbytes, block.elastic))
    return tuple(events)


def steps_of(plan: Plan, run_on: str | None = None) -> int:
    """The number of steps that show the memory that ``plan`` needs.

    The optimizer's state exists in the second step; in the third an allocator's cache is full-grown.
    """
    cached = run_on is None and any(device.allocator is not None for device in plan.devices)
    return _CACHED_STEPS if cached else _STEPS


def measure(device: DevicePeak, run: DeviceTimeline) -> DevicePeak:
    """``device`` with the memory that it needs for ``run``.

    Under a budget the allocator may reserve what ``context`` and ``reserve`` leave of it. If that is too
    little, ``reserved`` is the least amount with which the steps run, to within 0.4 %.
    """
    peak = run.timeline.peaks().get(run.place, Moment()).nbytes
    if device.allocator is None:
        return replace(device, peak=peak, reserved=None)
    both = run.timeline.peaks(workspaces=True).get(run.place, Moment()).nbytes
    limit = None if device.room is None else max(0, device.room)
    usage = _usage(device, run, limit)
    reserved = usage.reserved
    if usage.failed is not None:
        assert limit is not None
        reserved, usage = _min_limit(device, run, max(limit, peak - 1))
    return replace(
        device,
        peak=peak,
        workspaces=both - peak,
        reserved=reserved,
        starved=-(-usage.starved // _CACHED_STEPS),
    )


def measure_host(host: HostPeak | None, found: HostUsage) -> HostPeak | None:
    """``host`` with the memory that was ``found`` to be used; None if nothing was offloaded."""
    if host is None and not found.peak:
        return None
    budget = None if host is None else host.budget
    return HostPeak(peak=found.peak, reserved=found.reserved, budget=budget)


def bytes_without_starvation(device: DevicePeak, run: DeviceTimeline) -> int:
    """The bytes with which no kernel on ``device`` is starved, to within 0.4 %.

    ``device`` is a result of `measure` for ``run``.
    """
    if not device.starved or device.room is None:
        return device.needed
    too_little = max(0, device.room, device.peak + device.workspaces - 1)
    return device.context + _min_limit(device, run, too_little, starving=False)[0]


def _usage(device: DevicePeak, run: DeviceTimeline, limit: int | None) -> Usage:
    known = {} if run.usages is None else run.usages
    key = device.allocator == "expandable", limit
    if key not in known:
        known[key] = device_usage(run.timeline, run.place, expandable=key[0], limit=limit)
    return known[key]


def _min_limit(
    device: DevicePeak, run: DeviceTimeline, too_little: int, *, starving: bool = True
) -> tuple[int, Usage]:
    """The least limit above ``too_little`` with which the steps run, and the usage under it.

    A bisection. Without ``starving`` no kernel may be starved.
    """

    def is_enough(limit: int) -> bool:
        tried = _usage(device, run, limit)
        within = tried.failed is None and tried.reserved <= limit
        return within and (starving or not tried.starved)

    # The allocator may ask the driver for more than it takes, and may take more than it asked for.
    enough = max(_usage(device, run, None).reserved, too_little + 1)
    while not is_enough(enough):
        too_little, enough = enough, enough + enough // 16 + 1
    while enough - too_little > _PRECISION * enough:
        half = (enough + too_little) // 2
        if is_enough(half):
            enough = half
        else:
            too_little = half
    return enough, _usage(device, run, enough)
