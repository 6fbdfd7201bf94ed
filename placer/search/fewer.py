"""Says where a plan would be faster with fewer of its devices."""

from __future__ import annotations

from placer.plan.types import Plan
from placer.quantities import format_seconds
from placer.search.search import AS_GOOD
from placer.simulation.judge import JudgingPlanner
from placer.spec import PlacementSpec


def faster_with_fewer(spec: PlacementSpec, plan: Plan, make: JudgingPlanner) -> str:
    """A sentence: with fewer of its devices, ``plan`` for ``spec`` would be faster; "" if it would not.

    Nothing is said of plans that do not fit or may not, or were not chosen by time.
    """
    known = plan.fits and all(device.budget is not None for device in plan.devices)
    if not known or spec.objective == "memory" or spec.replica_devices:
        return ""
    specs = [spec.with_devices(spec.devices[:count]) for count in _counts(spec)[:-1]]
    made = [make.estimate(fewer) for fewer in specs]
    fast = [p for p in made if p.fits and p.rank_time * AS_GOOD < plan.rank_time]
    for fewer in sorted(fast, key=lambda plan: plan.rank_time):
        judged = make.judge(fewer)
        if not judged.fits or judged.starved:
            continue
        names = ", ".join(dict.fromkeys(stage.devices[0] for stage in fewer.stages))
        said = f"with {names} alone, a step would take"
        if fewer.step_seconds is None or plan.step_seconds is None:
            return f"Fewer devices would be faster by reference rates: {said} less time."
        before, now = (format_seconds(p.step_seconds or 0.0) for p in (plan, fewer))
        return f"Fewer devices would be faster: {said} {now} instead of {before}."
    return ""


def _counts(spec: PlacementSpec) -> list[int]:
    """The numbers of devices, from the first on, that hold all devices which the spec's layers name.

    Stages that are split in space have several devices each.
    """
    pinned = set(spec.layers.values())
    least = max((i for i, d in enumerate(spec.devices, 1) if d.name in pinned), default=1)
    counts = range(least, len(spec.devices) + 1)
    return [count for count in counts if count % spec.space.number == 0]
