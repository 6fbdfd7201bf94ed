"""Says where fewer of its devices would be as fast as a plan, or faster."""

from __future__ import annotations

from placer.plan.types import Plan
from placer.quantities import format_seconds
from placer.search.search import AS_GOOD
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec


def as_fast_with_fewer(spec: PlacementSpec, plan: Plan, make: JudgingPlanner) -> str:
    """A sentence: ``plan`` for ``spec`` would be faster, or as fast, with fewer of its devices; else "".

    Nothing is said of plans that do not fit or may not, or were not chosen by time.
    """
    known = plan.fits and all(device.budget is not None for device in plan.devices)
    if not known or spec.objective == "memory" or spec.replica_devices:
        return ""
    counts = [count for count in _counts(spec) if count < plan.num_devices]
    made = [make.estimate(spec.with_devices(spec.devices[:count])) for count in counts]
    fast = [p for p in made if p.fits and p.rank_time <= plan.rank_time * AS_GOOD]
    for fewer in sorted(fast, key=lambda plan: plan.rank_time):
        judged = make.judge(fewer)
        if not judged.fits or judged.starved:
            continue
        used = dict.fromkeys(d for stage in fewer.stages for d in fewer.devices_of(stage, 0))
        is_faster = fewer.rank_time * AS_GOOD < plan.rank_time
        what = "faster" if is_faster else "as fast"
        said = f"with {', '.join(used)} alone, a step would take"
        if fewer.step_seconds is None or plan.step_seconds is None:
            time = "less time" if is_faster else "as long"
            return f"Fewer devices would be {what} by reference rates: {said} {time}."
        before, now = (format_seconds(p.step_seconds or 0.0) for p in (plan, fewer))
        instead = f" instead of {before}" if now != before else ""
        return f"Fewer devices would be {what}: {said} {now}{instead}."
    return ""


def _counts(spec: PlacementSpec) -> list[int]:
    """The numbers of devices, from the first on, that hold all devices which the spec's layers name.

    Stages that are split in space have several devices each.
    """
    pinned = set(spec.layers.values())
    least = max((i for i, d in enumerate(spec.devices, 1) if d.name in pinned), default=1)
    counts = range(least, len(spec.devices) + 1)
    return [count for count in counts if count % spec.space.number == 0]
