"""Plans whose verdict, whether they fit, is that of a dry run of the emitted module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from placer.cost import CostEstimates
from placer.executor.place import HOST
from placer.partition import TableCache
from placer.plan.types import DevicePeak, Plan, StageMemory, everything_fits
from placer.planner.build import PlanMaker, build_plan
from placer.planner.host_memory import HOST_NAME
from placer.program import Program
from placer.simulation.ranks import rank_timelines, ranks_host_usage
from placer.simulation.simulate import simulate_steps
from placer.simulation.usage import (
    DeviceTimeline,
    comfortable_nbytes,
    device_timeline,
    measure,
    measure_host,
)
from placer.spec import PlacementSpec
from placer.timeline import HostUsage, host_usage
from placer.units import format_count

_MOST_ROUNDS = 3  # of planning with corrections
# Of 126 placements of four MONAI networks that the suite does not have, the worst prediction was
# 14% below its dry run; a device that has more room than that, or lacks more, is not run for it.
_DOUBTFUL_SHARE = 0.15
_CLEAR_SHARE = 1 / (1 + _DOUBTFUL_SHARE)  # of a budget: what fills no more fits without a doubt
_NO_BYTES = StageMemory(
    parameters=0,
    gradients=0,
    optimizer=0,
    buffers=0,
    saved=0,
    boundary=0,
    transient=0,
    peak=0,
)


class Planner:
    """Plans specs for one captured model and its inputs, and judges every plan's verdict.

    Where a judged plan does not fit, or starves kernels of the memory that they want to work in, it is
    planned again with what its devices need beyond their estimates as corrections, a few times: a
    heuristic. A plan that fits and starves no kernel is taken, else one that fits, else the one that
    overflows the least.

    In one process on CPUs a plan is dry-run when a device's estimate is near its budget; its peaks stay
    the estimates, unless the dry run comes to another verdict. On CUDA devices it always is, as only
    then it is known what torch's allocator takes (`placer.simulation.usage`). With ``processes`` what
    devices need is that of `rank_timelines`: estimates are of one process, and a rank holds more (what it
    received, both halves of a split backward, buckets, whole results in inference; and every replica has
    its own optimizer). With ``verdict_only`` that is found out only where there is a budget to exceed.
    Without ``judged`` all stay estimates.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Tensor],
        *,
        processes: bool = False,
        judged: bool = True,
        verdict_only: bool = False,
    ) -> None:
        self.costs = CostEstimates(program)
        self._program, self._inputs = program, inputs
        self._processes, self._judged, self._verdict_only = processes, judged, verdict_only
        self._tables = TableCache()
        self._runs: list[tuple[Plan, _DryRun]] = []

    def __call__(self, spec: PlacementSpec) -> Plan:
        """As `placer.planner.build.PlanMaker` says."""
        return self._plan(spec)

    def try_out(self, spec: PlacementSpec) -> Plan:
        """As `placer.planner.build.PlanMaker` says."""
        return self._plan(spec, enough=_CLEAR_SHARE, second_look=False)

    def guess(self, spec: PlacementSpec) -> Plan:
        """As `placer.planner.build.PlanMaker` says."""
        return build_plan(
            self._program,
            spec,
            self._inputs,
            estimate=self.costs.scaled(),
            processes=self._processes,
            tables=self._tables,
            enough=_CLEAR_SHARE,
        )

    def judge(self, plan: Plan) -> Plan:
        """``plan`` with the verdict of a dry run, where one is needed."""
        return self._judge(plan)[0]

    def _plan(self, spec: PlacementSpec, *, enough: float = 0.0, second_look: bool = True) -> Plan:
        build = partial(
            build_plan,
            self._program,
            spec,
            self._inputs,
            estimate=self.costs,
            processes=self._processes,
            tables=self._tables,
            enough=enough,
        )
        plan = build()
        if not self._judged:
            return plan
        if not second_look:
            limited = plan.host is not None and plan.host.budget is not None
            doubtful = self._processes or limited or any(map(_is_doubtful, plan.devices))
            return self.judge(plan) if plan.fits and doubtful else plan
        judged = self._rounds(build, plan, starving=False)
        if not any(p.fits for p in judged) and any(map(_starved, judged)):
            judged += self._rounds(build, plan, starving=True)
        return _with_notes(min(judged, key=lambda p: (not p.fits, _starved(p), p.overflow_bytes)))

    def _rounds(self, build: Callable[..., Plan], plan: Plan, *, starving: bool) -> list[Plan]:
        """``plan`` judged, then those that leave the room that it lacks, till one has enough.

        Kernels that starve have enough only with ``starving``.
        """
        judged: list[Plan] = []
        beyond: dict[str, int] = {}  # what estimates were too low by
        for number in range(_MOST_ROUNDS):
            if number:
                plan = build(corrections=beyond)
            found, run = self._judge(plan)
            judged.append(found)
            if run is None or (found.fits and (starving or not _starved(found))):
                break
            if any(
                d.headroom is not None and d.headroom < 0
                for d in plan.devices
                if not _is_doubtful(d)
            ):
                break  # by far too little memory: to leave some of it free does not help
            before = beyond
            beyond = _corrections(before, plan, found, run, starving=starving)
            if not any(nbytes > before.get(name, 0) for name, nbytes in beyond.items()):
                break
        return judged

    def _judge(self, plan: Plan) -> tuple[Plan, _DryRun | None]:
        """``plan`` with the verdict of a dry run, and that run; None where none was needed."""
        replaced = self._replaces_estimates(plan)
        if not (replaced or plan.host is not None or any(map(_is_doubtful, plan.devices))):
            return plan, None
        run = self._dry_run(plan)
        found = _with_devices(plan, run(plan.devices), run.host)
        if plan.fits != found.fits and not self._processes:
            note = (
                f"Estimates said that it {'fits' if plan.fits else 'does not fit'}; "
                "peaks are a dry run's."
            )
            return replace(found, notes=(*found.notes, note)), run
        return (found if replaced else replace(plan, host=found.host)), run

    def _replaces_estimates(self, plan: Plan) -> bool:
        """Whether peaks of ``plan`` are to be those of a dry run, whatever its estimates are."""
        if not self._processes:
            return any(device.allocator is not None for device in plan.devices)
        budgets = [device.budget for device in plan.devices]
        return not self._verdict_only or any(budget is not None for budget in budgets)

    def _dry_run(self, plan: Plan) -> _DryRun:
        """The dry run of ``plan``, which is made once."""
        key = _without_costs(plan)
        for known, run in self._runs:
            if known == key:
                return run
        run = self._new_dry_run(plan)
        self._runs.append((key, run))
        return run

    def _new_dry_run(self, plan: Plan) -> _DryRun:
        if self._processes:
            ranks = [run for _, run in rank_timelines(self._program, plan, self._inputs, once=True)]
            host = ranks_host_usage(plan, [rank.timeline for rank in ranks])
            return _DryRun(tuple(itertools.islice(itertools.cycle(ranks), len(plan.devices))), host)
        timeline = simulate_steps(self._program, plan, self._inputs)
        found = [device_timeline(timeline, device.device) for device in plan.devices]
        return _DryRun(found, host_usage(timeline, HOST.name))


@dataclass(frozen=True, slots=True)
class _DryRun:
    """Per device of a plan what it was given, and what waited on the host."""

    found: Sequence[DeviceTimeline]
    host: HostUsage

    def __call__(self, devices: Sequence[DevicePeak]) -> tuple[DevicePeak, ...]:
        """The devices with what they need."""
        return tuple(measure(*pair) for pair in zip(devices, self.found, strict=True))


def plan_maker(program: Program, inputs: Sequence[Tensor], *, processes: bool = False) -> PlanMaker:
    """How specs for this model and these inputs are planned; see `Planner`."""
    return Planner(program, inputs, processes=processes)


def _corrections(
    before: Mapping[str, int], plan: Plan, judged: Plan, run: _DryRun, *, starving: bool
) -> dict[str, int]:
    """Per device of the first replica what those in its place need at most beyond ``plan``'s estimates.

    And the same for the host. With ``starving`` that is with kernels that starve, else without.
    """
    beyond = dict(before)
    # A plan need not use all the devices that another one did.
    names = itertools.cycle([device.device for device in plan.devices[: plan.num_devices]])
    given = zip(judged.devices, plan.devices, run.found, strict=True)
    for name, (now, estimate, timeline) in zip(names, given, strict=False):
        needed = now.needed if starving else comfortable_nbytes(now, timeline)
        beyond[name] = max(beyond.get(name, 0), needed - estimate.needed)
    if plan.host is not None and judged.host is not None:
        more = judged.host.needed - plan.host.needed
        beyond[HOST_NAME] = max(beyond.get(HOST_NAME, 0), more)
    return beyond


def _starved(plan: Plan) -> bool:
    return any(device.starved for device in plan.devices)


def _with_notes(plan: Plan) -> Plan:
    """``plan`` with a note of the devices whose kernels starve."""
    starved = {device.device: device.starved for device in plan.devices if device.starved}
    if not starved or not plan.fits:
        return plan
    names = " and ".join(
        f"{format_count(count, 'kernel')} of a step on {name}" for name, count in starved.items()
    )
    note = (
        f"It fits, but {names} will find less memory to work in than wanted: expect slower steps. "
        "With more memory, a smaller input or more recomputation they would be faster."
    )
    return replace(plan, notes=(*plan.notes, note))


def _is_doubtful(device: DevicePeak) -> bool:
    return device.headroom is not None and abs(device.headroom) <= _DOUBTFUL_SHARE * device.peak


def _without_costs(plan: Plan) -> Plan:
    """``plan`` as a dry run sees it: what runs where, without what is expected of it."""
    stages = tuple(
        replace(
            stage,
            layers=(),
            memory=_NO_BYTES,
            budget=None,
            reserve=0,
            forward_seconds=0.0,
            backward_seconds=0.0,
            forward_launch_seconds=0.0,
            backward_launch_seconds=0.0,
            host_copy_seconds=0.0,
            host_copy_nbytes=0,
        )
        for stage in plan.stages
    )
    return replace(
        plan,
        fits=True,
        objective="memory",
        step_seconds=0.0,
        optimizer_seconds=0.0,
        stages=stages,
        devices=tuple(
            DevicePeak(device=d.device, peak=0, budget=None, reserve=0, allocator=d.allocator)
            for d in plan.devices
        ),
        transfers=(),
        notes=(),
        optimality=None,
        extra_time=None,
        boundaries=(),
        host=None,
    )


def _with_devices(plan: Plan, devices: tuple[DevicePeak, ...], waits: HostUsage) -> Plan:
    """``plan`` with what its devices need, one for each of them, and what ``waits`` on the host."""
    row = plan.num_devices
    changed = {
        now.device: now.peak
        for now, before in zip(devices[:row], plan.devices[:row], strict=True)
        if now.peak != before.peak
    }
    names = [stage.devices[0] for stage in plan.stages]
    stages = []
    for stage, name in zip(plan.stages, names, strict=True):
        # With several stages on a device the estimates of each stay: a peak is that of all.
        memory = stage.memory
        if name in changed and names.count(name) == 1:
            memory = _with_peak(memory, changed[name])
        stages.append(replace(stage, memory=memory))
    host = measure_host(plan.host, waits)
    fits = everything_fits(devices, host)
    return replace(plan, fits=fits, devices=devices, stages=tuple(stages), host=host)


def _with_peak(memory: StageMemory, peak: int) -> StageMemory:
    known = memory.parameters + memory.gradients + memory.optimizer + memory.buffers + memory.saved
    return replace(memory, peak=peak, transient=max(0, peak - known))
