"""Says how good the strategy is that a search chose, and why every other one lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from placer.plan.step_spans import step_spans
from placer.plan.types import Alternative, Plan
from placer.quantities import format_bytes, format_count, format_seconds
from placer.search.search import AS_GOOD, Found, Rated
from placer.timeline import end_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The seconds of a step, on the device that computes the longest."""

    computing: float
    waiting: float  # for other stages, and for what they send
    summing: float  # gradients, when nothing hides it
    updating: float  # the optimizer's step

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.computing + self.waiting + self.summing + self.updating


def step_parts(plan: Plan) -> StepParts | None:
    """What the step of ``plan`` consists of; None if its times are not known."""
    spans = step_spans(plan)
    if not spans or plan.step_seconds is None:
        return None
    computed = [span for span in spans if span.kind == "compute"]
    busy: dict[str, float] = {}
    for span in computed:
        busy[span.on[0]] = busy.get(span.on[0], 0.0) + span.end - span.start
    computing, ended = max(busy.values()), end_of(computed)
    updating = plan.optimizer_seconds or 0.0
    return StepParts(
        computing=computing,
        waiting=ended - computing,
        summing=max(0.0, end_of(spans) - ended - updating),
        updating=updating,
    )


def with_alternatives(plan: Plan, found: Found, devices: int) -> Plan:
    """``plan``, which is the one of ``found.best``, with what else was looked at on so many ``devices``."""
    assert found.best is not None
    others = [_alternative(rated, plan) for rated in (*found.others, *found.unfit)]
    return replace(
        plan,
        strategy=found.best.strategy.describe(),
        alternatives=tuple(others),
        notes=(*_notes(plan, found.best, devices), *plan.notes),
    )


def _notes(plan: Plan, best: Rated, devices: int) -> Iterator[str]:
    idle = devices - len(plan.devices)
    if idle and plan.objective != "devices":
        verb = "is" if idle == 1 else "are"
        yield f"{format_count(idle, 'device')} {verb} left idle: nothing that uses more was better."
    if best.worst_time > plan.rank_time * AS_GOOD:
        yield (
            "At worst, where collectives use one network card of each node, a step takes "
            f"{format_seconds(best.worst_time)}."
        )


def _alternative(rated: Rated, best: Plan) -> Alternative:
    plan = rated.plan
    if plan is None:
        nbytes, seconds = int(rated.bound.nbytes), rated.bound.seconds
        state = format_bytes(rated.bound.state)
        reason = f"needs at least {format_bytes(nbytes)} on a device, {state} of it for state"
        if rated.fits:
            reason = "by a rough estimate, without a plan" + _worst(rated, best)
        return Alternative(
            strategy=rated.strategy.describe(),
            devices=rated.strategy.devices,
            fits=rated.fits,
            judged=False,
            step_seconds=seconds if rated.fits else None,
            slower=seconds / best.rank_time if rated.fits and best.rank_time else None,
            peak=nbytes,
            headroom=None,
            reason=reason,
        )
    return Alternative(
        strategy=rated.strategy.describe(),
        devices=rated.strategy.devices,
        fits=plan.fits,
        judged=rated.judged,
        step_seconds=plan.step_seconds,
        slower=plan.rank_time / best.rank_time if best.rank_time else None,
        peak=rated.peak,
        headroom=plan.tightest.headroom,
        reason="; ".join(_reasons(plan, best, judged=rated.judged)) + _worst(rated, best),
    )


def _worst(rated: Rated, best: Plan) -> str:
    """What speaks against a strategy that is faster than ``best``: its time on the machine at its worst."""
    seconds = rated.bound.seconds if rated.plan is None else rated.plan.rank_time
    if not rated.fits or seconds >= best.rank_time or rated.worst_time <= seconds * AS_GOOD:
        return ""
    return f"; {format_seconds(rated.worst_time)} if collectives use one network card of a node"


def _reasons(plan: Plan, best: Plan, *, judged: bool) -> Iterator[str]:
    """Why ``plan`` is not as good as ``best``: the bytes or the part of the time in which it is worse."""
    if not plan.fits:
        device = plan.tightest
        yield f"{format_bytes(plan.overflow_bytes)} too much on {device.device}"
        return
    if plan.starved and not best.starved:  # its time is not known
        yield f"{format_count(plan.starved, 'kernel')} without workspace"
        return
    if best.objective == "memory" and plan.tightest.peak > best.tightest.peak:
        yield f"peak {format_bytes(plan.tightest.peak)}, not {format_bytes(best.tightest.peak)}"
        return
    if best.objective == "devices" and len(plan.devices) > len(best.devices):
        yield f"{len(plan.devices)} devices, not {len(best.devices)}"
        return
    mine, its = step_parts(plan), step_parts(best)
    if mine is None or its is None:
        yield "slower by reference rates"
        return
    if mine.total <= its.total * AS_GOOD:
        yield "as fast, and not simpler" if judged else "as fast by a rough estimate"
        return
    more = {
        "computes": mine.computing - its.computing,
        "waits": mine.waiting - its.waiting,
        "sums gradients": mine.summing - its.summing,
        "updates": mine.updating - its.updating,
    }
    what = max(more, key=lambda part: more[part])
    yield f"{what} {format_seconds(more[what])} longer"
    if plan.checkpoint and not best.checkpoint and what == "computes":
        yield "recomputes"
