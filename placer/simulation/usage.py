"""What a timeline needs of a device: tensors, workspaces, and what torch's allocator takes for both."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from placer.plan.types import DevicePeak, HostPeak, Plan
from placer.timeline import HostUsage, Moment, Timeline, Usage, device_usage

_STEPS, _CACHED_STEPS = 2, 3
_PRECISION = 1 / 256  # of the memory that a plan needs where it has too little


class DeviceTimeline(NamedTuple):
    """The timeline of `steps_of` a plan on one device, which is called ``place`` there."""

    timeline: Timeline
    place: str


def device_timeline(timeline: Timeline, device: str) -> DeviceTimeline:
    """What ``timeline``, of all devices, has of ``device``."""
    return DeviceTimeline(timeline.only(device), device)


def steps_of(plan: Plan, run_on: str | None = None) -> int:
    """How many steps show what ``plan`` needs.

    In the second the optimizer's state exists; the cache of an allocator has grown in the third.
    """
    cached = run_on is None and any(device.allocator is not None for device in plan.devices)
    return _CACHED_STEPS if cached else _STEPS


def measure(device: DevicePeak, run: DeviceTimeline) -> DevicePeak:
    """``device`` with what it needs by ``run``.

    Under a budget the allocator has what ``context`` and ``reserve`` leave of it. Where that is too
    little, ``reserved`` is the least with which the steps run, within 0.4 %: more than there is.
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
        reserved, usage = _least(device, run, max(limit, peak - 1))
    return replace(
        device,
        peak=peak,
        workspaces=both - peak,
        reserved=reserved,
        starved=-(-usage.starved // _CACHED_STEPS),
    )


def measure_host(host: HostPeak | None, found: HostUsage) -> HostPeak | None:
    """``host`` with what was ``found`` there; None where nothing waits on it."""
    if host is None and not found.peak:
        return None
    budget = None if host is None else host.budget
    return HostPeak(peak=found.peak, reserved=found.reserved, budget=budget)


def comfortable_nbytes(device: DevicePeak, run: DeviceTimeline) -> int:
    """Bytes that ``device`` needs for every kernel to have the workspace that it wants, within 0.4 %.

    ``device`` was measured by ``run``.
    """
    if not device.starved or device.room is None:
        return device.needed
    too_little = max(0, device.room, device.peak + device.workspaces - 1)
    return device.context + _least(device, run, too_little, starving=False)[0]


def _usage(device: DevicePeak, run: DeviceTimeline, limit: int | None) -> Usage:
    return device_usage(
        run.timeline, run.place, expandable=device.allocator == "expandable", limit=limit
    )


def _least(
    device: DevicePeak, run: DeviceTimeline, too_little: int, *, starving: bool = True
) -> tuple[int, Usage]:
    """The least limit above ``too_little`` with which the steps run, and what they then use."""
    usage = _usage(device, run, None)
    enough = max(usage.reserved, too_little + 1)
    while enough - too_little > _PRECISION * enough:
        half = (enough + too_little) // 2
        tried = _usage(device, run, half)
        if tried.failed is None and (starving or not tried.starved):
            enough, usage = half, tried
        else:
            too_little = half
    return enough, usage
