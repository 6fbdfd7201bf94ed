"""Makes plans and checks by a dry run of the emitted module whether they fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol, get_args

from pydantic import TypeAdapter
from torch import Tensor

from placer.cost import CostEstimates, Loss, find_loss
from placer.errors import SpecError
from placer.garbage import only_new_garbage
from placer.grid import Grid, NodeLayout
from placer.partition import MANY_STAGES, TableCache
from placer.plan.summary import describe_runtime
from placer.plan.types import DevicePeak, Plan, PlannedLoss, everything_fits
from placer.planner.build import build_plan
from placer.planner.devices import device_slot, links_of
from placer.planner.host_memory import HOST_NAME
from placer.planner.resolve import count_replicas, node_layout_of
from placer.program import Program, rewritten
from placer.quantities import format_bytes, format_count
from placer.simulation.simulate import DryRun, describe_run, dry_run
from placer.simulation.types import SimulationReport
from placer.simulation.usage import bytes_without_starvation, measure_host
from placer.space import MOST_CHUNKS, spec_rewrites
from placer.spec import LossSpec, PlacementSpec
from placer.spec.fields import ScheduleName
from placer.spec.rewrite import Rewrite
from placer.state_layout import ShardState
from placer.timeline import HostUsage

_REGION_FIELDS = "checkpoint", "offload"
_MAX_ROUNDS = 3  # of planning with corrections
# In 126 placements of four MONAI networks outside the test suite, the worst estimate was 14% below the
# dry run. If an estimate differs from the budget by more than this share, no dry run is needed.
_DOUBTFUL_SHARE = 0.15
_CLEAR_SHARE = 1 / (1 + _DOUBTFUL_SHARE)  # an estimate below this share of a budget certainly fits
# A plan that overflows by a larger share of what it needs is not made to fit by corrections: where the
# estimate does not fit either, and where it does.
_FAR_SHARE, _CONTRADICTED_SHARE = 0.1, 1 / 3
_ROOMY = 4
_FOLDED = 1.5  # what a device with several stages may need at most, as a multiple of its estimate
_PLAN = TypeAdapter(Plan)
# What a dry run does not depend on; it may depend on any other field.
_STAGE_COSTS = {
    *("layers", "memory", "budget", "reserve", "host_copy_seconds", "host_copy_nbytes"),
    *("forward_seconds", "backward_seconds", "forward_launch_seconds", "backward_launch_seconds"),
    "sum_seconds",
}
_DEVICE_COSTS = {f.name for f in fields(DevicePeak)} - {"device", "allocator"}
_COSTS: Any = {
    **dict.fromkeys(("fits", "objective", "step_seconds", "optimizer_seconds", "transfers"), True),
    **dict.fromkeys(("rank_time", "notes", "optimality", "extra_seconds", "boundaries"), True),
    **dict.fromkeys(("host", "strategy", "alternatives"), True),
    "stages": {"__all__": _STAGE_COSTS},
    "devices": {"__all__": _DEVICE_COSTS},
}


class Watcher(Protocol):
    """Is told what a planner does, which may take minutes."""

    def doing(self, what: str) -> None:
        """What is done now."""

    def planned(self, spec: PlacementSpec, plan: Plan, *, judged: bool) -> None:
        """A spec was planned, and if ``judged`` it is known whether the plan fits, not estimated."""


class JudgingPlanner:
    """Plans specs for one captured model and its inputs, and judges whether each plan fits.

    If a plan does not fit in a dry run, or if kernels are starved (they find no room for the workspace
    that they want), the planner tries again with corrections: the bytes by which the dry run exceeded the
    estimates. This heuristic is repeated a few times; if it does not help, the plan of least memory is judged
    too. The best plan is one that fits and starves the fewest kernels, otherwise the one that exceeds its
    budgets the least. If a spec leaves both to the planner, what to recompute and what to offload, and
    something has to be, plans with only one of them are judged too: the search for both is a heuristic, and
    one alone is sometimes better.

    In one process on CPUs there is a dry run only if the estimate of a device is near its budget; the
    plan then keeps the estimated peaks, unless the dry run gives another verdict. On CUDA devices there
    is always a dry run, because only that shows what torch's allocator reserves
    (`placer.simulation.usage`). With ``processes`` the dry run is that of ranks, because
    estimates are for one process and a rank needs more memory (received values, both halves of a split
    backward, buckets, whole results in inference, an optimizer per replica). With ``verdict_only`` a
    dry run is made only if there is a budget, and in one process only if a device has less than four times
    the room that its estimate needs.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Tensor],
        *,
        processes: bool = False,
        verdict_only: bool = False,
        loss: Loss | None = None,
    ) -> None:
        self.program, self.inputs = program, inputs  # as they were captured
        self._programs = {program.rewrites: _Known(program)}
        self.processes, self._verdict_only = processes, verdict_only  # one for each device?
        self._runs: dict[bytes, DryRun] = {}
        self._loss, self._losses = loss, dict[LossSpec | None, Loss]()
        self.watcher: Watcher | None = None
        self.purpose = ""  # why plans are made now, for the watcher
        self._about = ""  # the spec that is planned, for the watcher

    @property
    def costs(self) -> CostEstimates:
        """The costs of the model as it was captured."""
        return self._programs[self.program.rewrites].costs

    def program_of(self, plan: Plan) -> Program:
        """The program that ``plan`` is for."""
        return self._known(plan.rewrites).program

    def _known(self, rewrites: tuple[Rewrite, ...]) -> _Known:
        if rewrites not in self._programs:
            self._programs[rewrites] = _Known(rewritten(self.program, rewrites))
        return self._programs[rewrites]

    def loss_of(self, wanted: PlacementSpec | Plan) -> Loss:
        """The loss that plans for a spec count, or that a plan counts."""
        if self._loss is not None:
            return self._loss
        found = wanted.loss.spec if isinstance(wanted.loss, PlannedLoss) else wanted.loss
        if found not in self._losses:
            self._losses[found] = find_loss(found)  # once, because it imports the user's code
        return self._losses[found]

    def __call__(self, spec: PlacementSpec) -> Plan:
        """The plan for ``spec``."""
        return self._watched(spec, self._best(spec))

    def _best(self, spec: PlacementSpec) -> Plan:
        if spec.space.shards == "auto":
            return self._with_any_shards(spec)
        if spec.chunks == "auto":
            return self._choose(spec, "chunks", (1, MOST_CHUNKS), is_enough=_is_plain)
        if spec.schedule == "auto":
            return self._choose(spec, "schedule", self._schedules(spec))
        if spec.node_layout == "auto":
            nodes = self.processes and links_of(spec).network is not None
            return self._choose(
                spec,
                "node_layout",
                get_args(NodeLayout),
                is_enough=lambda plan: not (nodes and plan.grid.has_layouts),
            )
        if spec.shard_state == "auto":
            return self._choose(
                spec,
                "shard_state",
                get_args(ShardState),
                is_enough=lambda plan: (
                    plan.fits or not self.processes or plan.replicas * plan.shards == 1
                ),
            )
        if spec.shard_over == "auto" and (in_node := self._shares_in_node(spec)) > 1:
            return self._choose(spec, "shard_over", (count_replicas(spec), in_node))
        plans = [self._plan(spec)]
        both = spec.checkpoint == spec.offload == "auto"
        if spec.training and both and not _is_plain(plans[0]):
            plans += [self._plan(spec.model_copy(update={field: ()})) for field in _REGION_FIELDS]
        return min(plans, key=partial(_rank, spec.objective))

    def _choose(
        self,
        spec: PlacementSpec,
        field: str,
        values: Sequence[Any],
        *,
        is_enough: Callable[[Plan], bool] = lambda _: False,
    ) -> Plan:
        """The best plan with one of ``values`` in ``field``; the others are not tried if a plan is enough."""
        plans: list[Plan] = []
        for value in values:
            plans.append(self._best(spec.model_copy(update={field: value})))
            if is_enough(plans[-1]):
                break
        return min(plans, key=partial(_rank, spec.objective))

    def _shares_in_node(self, spec: PlacementSpec) -> int:
        """How many replicas of a node can divide their state, no group over two nodes; 1: no choice.

        That is if none can, or if all replicas are in one node.
        """
        links, replicas = links_of(spec), count_replicas(spec)
        if spec.shard_state in ("none", "auto") or not self.processes or links.network is None:
            return 1
        stages = len(spec.on_its_stages().devices) // spec.space.number
        grid = Grid(replicas=replicas, devices=stages, node_layout=node_layout_of(spec))
        in_node, rest = divmod(links.node, grid.stride * spec.space.number)
        return 1 if rest or in_node >= replicas else math.gcd(in_node, replicas)

    def _schedules(self, spec: PlacementSpec) -> tuple[ScheduleName, ...]:
        """The schedules that can be the best: one with whole backwards, and one with split ones."""
        if not spec.training or (spec.loss is not None and spec.loss.whole_batch):
            return ("GPipe",)
        splits = self.processes and not spec.compile
        return ("1F1B", "InterleavedZeroBubble") if splits else ("1F1B",)

    def _with_any_shards(self, spec: PlacementSpec) -> Plan:
        """The plan with the best number of shards; 1 if the model then fits as it is."""
        plans: list[Plan] = []
        refused: list[str] = []
        for shards in range(1, len(spec.devices) + 1):
            if len(spec.devices) % shards:
                continue
            space = spec.space.model_copy(update={"shards": shards})
            try:
                plans.append(self._best(spec.model_copy(update={"space": space})))
            except SpecError as error:  # so many parts are too thin, or nothing can be cut
                if shards == 1:
                    raise
                refused.append(f'"space": {shards} is not possible: {error.problems[0][1]}.')
                continue
            if shards == 1 and _is_plain(plans[0]):
                break
        best = min(plans, key=partial(_rank, spec.objective))
        return replace(best, notes=(*best.notes, *refused)) if refused else best

    def elsewhere(self, spec: PlacementSpec, plan: Plan) -> str:
        """A sentence, if ``plan`` for ``spec`` fits, and in the other runtime it does not, or the reverse.

        The runtimes are one process, and a process per device. Nothing is said of a single device, nor of
        devices of which more than two thirds are free.
        """
        known = [device for device in plan.devices if device.budget is not None]
        roomy = all((device.headroom or 0) > 2 * device.needed for device in known)
        if len(plan.devices) == 1 or not known or (plan.fits and roomy):
            return ""
        if plan.shard_state != "none":  # one process cannot run it
            return ""
        other = JudgingPlanner(
            self.program, self.inputs, processes=not self.processes, loss=self._loss
        )
        other._programs = self._programs
        judged = other.judge(replace(plan, processes=not plan.processes))
        if not judged.fits:
            judged = other(spec)  # with other stages it may
        if judged.fits == plan.fits:
            return ""
        where = describe_runtime(judged).capitalize()
        if judged.fits:
            return f"{where}, it fits."
        return f"{where}, it does not fit, by {format_bytes(judged.overflow_bytes)}."

    def quick_plan(self, spec: PlacementSpec) -> Plan:
        """A plan that shows whether ``spec`` fits, not the fastest one.

        It prefers little memory to little time, so it is seldom near a budget and seldom needs a dry run.
        If it does not fit by its estimates it gets no dry run, which might have another verdict.
        """
        plan = self._plan(spec, stop_at_share=_CLEAR_SHARE, second_look=False)
        return self._watched(spec, plan, judged=False)

    @only_new_garbage()
    def estimate(self, spec: PlacementSpec, *, spare: float = 0.0) -> Plan:
        """The plan for ``spec`` by its estimates, which `judge` can judge by a dry run.

        The share ``spare`` of each device's budget is kept free, because estimates may be too low.
        """
        slots = [device_slot(device, spec) for device in spec.devices]
        kept = {slot.name: int(spare * (slot.budget or 0)) for slot in slots}
        return self._build(spec)(corrections=kept)

    @only_new_garbage()
    def rough_estimate(self, spec: PlacementSpec) -> Plan:
        """`estimate` from costs that are scaled from known ones, without running the model again."""
        return self._watched(spec, self._build(spec, rough=True)(), judged=False)

    @only_new_garbage()
    def rough_plan(self, spec: PlacementSpec) -> Plan:
        """An approximation of `quick_plan`'s plan from costs that are known, without running the model."""
        return self._build(spec, rough=True, stop_at_share=_CLEAR_SHARE)()

    def _build(
        self, spec: PlacementSpec, *, rough: bool = False, **options: Any
    ) -> Callable[..., Plan]:
        """`build_plan` for ``spec``, the program and its inputs."""
        names = [each.name for each in self.program.call.inputs]
        asked = spec_rewrites(spec, names, processes=self.processes)
        known = self._known((*self.program.rewrites, *asked))
        self._about = _describe(spec)
        self._say("looking for stages")
        return partial(
            build_plan,
            known.program,
            spec,
            self.inputs,
            processes=self.processes,
            estimate=known.costs.scaled if rough else known.costs,
            tables=known.tables,
            loss=self.loss_of(spec),
            **options,
        )

    def _say(self, what: str) -> None:
        if self.watcher is not None:
            self.watcher.doing(", ".join(filter(None, (self.purpose, self._about, what))))

    def _watched(self, spec: PlacementSpec, plan: Plan, *, judged: bool = True) -> Plan:
        if self.watcher is not None:
            self.watcher.planned(spec, plan, judged=judged)
        return plan

    @only_new_garbage()
    def judge(self, plan: Plan) -> Plan:
        """``plan`` with the verdict of a dry run, if one is needed."""
        return self._judge(plan)[0]

    @only_new_garbage()
    def simulate(self, plan: Plan) -> SimulationReport:
        """The report of the dry run of ``plan``, which is made if there was none."""
        return describe_run(plan, self._dry_run(plan), processes=self.processes)

    @only_new_garbage()
    def _plan(
        self, spec: PlacementSpec, *, stop_at_share: float = 0.0, second_look: bool = True
    ) -> Plan:
        build = self._build(spec, stop_at_share=stop_at_share)
        plan = build()
        if not second_look:
            limited = plan.host is not None and plan.host.budget is not None
            doubtful = self.processes or limited or any(map(_is_doubtful, plan.devices))
            return self.judge(plan) if plan.fits and doubtful else plan
        judged = self._rounds(build, plan, starving=False)
        if not any(p.fits for p in judged) and any(p.starved for p in judged):
            judged += self._rounds(build, plan, starving=True)
        contradicted = plan.fits and not any(p.fits and not p.starved for p in judged)
        if contradicted and spec.objective != "memory" and not _is_far(plan, judged[0]):
            # The fastest plans fill devices to their limit, where estimates are too rough.
            roomy = self._plan(spec.model_copy(update={"objective": "memory"}))
            judged.append(replace(roomy, objective=spec.objective))
        return min(judged, key=_verdict)

    def _rounds(self, build: Callable[..., Plan], plan: Plan, *, starving: bool) -> list[Plan]:
        """Judge ``plan``, then plans with corrections, until one fits.

        A plan that does not fit with these gets no dry run. One that starves kernels counts as one that fits
        only with ``starving``.
        """
        judged: list[Plan] = []
        shortfall: dict[str, int] = {}  # bytes by which estimates were too low
        for number in range(_MAX_ROUNDS):
            if number:
                plan = build(corrections=shortfall)
                if not _fits_with(shortfall, plan) and _run_key(plan) not in self._runs:
                    break
            found, run = self._judge(plan)
            judged.append(found)
            if run is None or (found.fits and (starving or not found.starved)):
                break
            if _is_far(plan, found):
                break
            before = shortfall
            shortfall = _corrections(before, plan, found, run, starving=starving)
            if not any(nbytes > before.get(name, 0) for name, nbytes in shortfall.items()):
                break
        return judged

    def _judge(self, plan: Plan) -> tuple[Plan, DryRun | None]:
        """``plan`` with the verdict of a dry run, and that run; None if none was needed."""
        replaced = self._replaces_estimates(plan)
        doubtful = any(map(_is_doubtful, plan.devices)) or _is_folded(plan)
        if not (replaced or plan.host is not None or doubtful):
            return plan, None
        run = self._dry_run(plan)
        if _runs_fullest(plan):
            said = "The peak of the fullest device is a dry run's, all others are estimates."
            plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, said))))
        found = _with_devices(plan, run(plan.devices), run.host)
        if plan.fits != found.fits and not self.processes:
            note = (
                f"Estimates said that it {'fits' if plan.fits else 'does not fit'}; "
                "peaks are a dry run's."
            )
            return replace(found, notes=(*found.notes, note)), run
        return (found if replaced else replace(plan, host=found.host)), run

    def _replaces_estimates(self, plan: Plan) -> bool:
        """Whether the peaks of ``plan`` must come from a dry run, whatever its estimates are."""
        unlimited = all(device.budget is None for device in plan.devices)
        roomy = not self.processes and all(map(_is_roomy, plan.devices))
        if self._verdict_only and (unlimited or roomy):
            return False
        # Estimates count a micro-batch's
        whole_batch = plan.loss is not None and plan.loss.whole_batch
        allocates = any(device.allocator is not None for device in plan.devices)
        return self.processes or whole_batch or allocates

    def _dry_run(self, plan: Plan) -> DryRun:
        """The dry run of ``plan``; cached."""
        key = _run_key(plan)
        if key not in self._runs:
            self._say("running a step without data")
            self._runs[key] = dry_run(
                self.program_of(plan),
                plan,
                self.inputs,
                self.loss_of(plan),
                processes=self.processes,
                only_fullest=_runs_fullest(plan),
            )
        return self._runs[key]


def _run_key(plan: Plan) -> bytes:
    """All of ``plan`` that its dry run depends on."""
    return _PLAN.dump_json(plan, exclude=_COSTS)


def _runs_fullest(plan: Plan) -> bool:
    """Is only the process of the fullest device run?

    The two fullest of GPT-3's 52 were neighbours that exceeded their estimates by the same bytes, and the
    second took 5 of 40 CPU seconds.
    """
    return plan.processes and len(plan.stages) > MANY_STAGES and not plan.offload


def _describe(spec: PlacementSpec) -> str:
    """In what specs for one model differ most often."""
    parts = [format_count(len(spec.devices), "device")]
    if spec.replicas != "auto" and spec.replicas > 1:
        parts = [f"{format_count(spec.replicas, 'replica')} of {parts[0]}"]
    counts = {
        "micro-batches": spec.microbatches,
        "chunks": spec.chunks,
        "shards": spec.space.shards,
    }
    parts += [f"{n} {name}" for name, n in counts.items() if n != "auto" and n > 1]
    parts += [name for name in _REGION_FIELDS if getattr(spec, name)]
    return ", ".join(parts)


class _Known:
    """A program, its costs and what plans of it share."""

    def __init__(self, program: Program) -> None:
        self.program, self.costs, self.tables = program, CostEstimates(program), TableCache()


def _is_far(plan: Plan, judged: Plan) -> bool:
    """Whether ``judged``, the verdict on ``plan``, overflows by more than corrections can mend."""
    share = _CONTRADICTED_SHARE if plan.fits else _FAR_SHARE
    return judged.overflow_bytes > share * judged.tightest.needed


def _is_plain(plan: Plan) -> bool:
    """Does it fit, without starved kernels, and without recomputing or offloading anything?"""
    return plan.fits and not (plan.starved or plan.checkpoint or plan.offload)


def _corrections(
    before: Mapping[str, int], plan: Plan, judged: Plan, run: DryRun, *, starving: bool
) -> dict[str, int]:
    """The most bytes by which the dry runs exceed the estimates, on each device of the first replica.

    A device's excess is the largest over all replicas. The host has an entry, too. The memory that is
    needed is counted with starved kernels if ``starving``, otherwise without.
    """
    shortfall = dict(before)
    # A plan need not use all the devices that another one did.
    names = itertools.cycle([device.device for device in plan.devices[: plan.num_devices]])
    given = zip(judged.devices, plan.devices, run.found, strict=True)
    for name, (now, estimate, timeline) in zip(names, given, strict=False):
        needed = now.needed
        if timeline is not None and not starving:
            needed = bytes_without_starvation(now, timeline)
        shortfall[name] = max(shortfall.get(name, 0), needed - estimate.needed)
    if plan.host is not None and judged.host is not None:
        more = judged.host.needed - plan.host.needed
        shortfall[HOST_NAME] = max(shortfall.get(HOST_NAME, 0), more)
    return shortfall


def _fits_with(shortfall: Mapping[str, int], plan: Plan) -> bool:
    """Whether ``plan`` fits by its estimates, if they are too low by ``shortfall``."""
    row = plan.devices[: plan.num_devices]
    return all(
        device.headroom is None or device.headroom >= shortfall.get(device.device, 0)
        for device in row
    )


def _verdict(plan: Plan) -> tuple[bool, int, int]:
    """Sort key: does it overflow, starved kernels, overflow in bytes."""
    return not plan.fits, plan.starved if plan.fits else 0, plan.overflow_bytes


def _rank(objective: str, plan: Plan) -> tuple[bool, int, int, float]:
    """`_verdict`, and then what the objective minimizes."""
    return *_verdict(plan), plan.peak if objective == "memory" else plan.rank_time


def _is_roomy(device: DevicePeak) -> bool:
    """Is there room for many times the estimate, so that no dry run can find that it does not fit?"""
    return device.room is None or _ROOMY * device.peak <= device.room


def _is_folded(plan: Plan) -> bool:
    """Has a device several stages, of which estimates leave something out, and not much more room?"""
    several = plan.fits and plan.grid.devices < len(plan.stages)
    return several and any(d.room is not None and d.room < _FOLDED * d.peak for d in plan.devices)


def _is_doubtful(device: DevicePeak) -> bool:
    return device.headroom is not None and abs(device.headroom) <= _DOUBTFUL_SHARE * device.peak


def _with_devices(plan: Plan, devices: tuple[DevicePeak, ...], waits: HostUsage) -> Plan:
    """``plan`` with the needs of its ``devices``, one for each of them, and what ``waits`` on the host."""
    row = plan.num_devices
    changed = {
        now.device: now.peak
        for now, before in zip(devices[:row], plan.devices[:row], strict=True)
        if now.peak != before.peak
    }
    names = [stage.devices[0] for stage in plan.stages]
    stages = []
    for stage, name in zip(plan.stages, names, strict=True):
        # If a device has several stages, each keeps its estimate: the peak is that of all together.
        memory = stage.memory
        if name in changed and names.count(name) == 1:
            peak = changed[name]
            memory = replace(memory, peak=peak, transient=max(0, peak - memory.kept))
        stages.append(replace(stage, memory=memory))
    host = measure_host(plan.host, waits)
    fits = everything_fits(devices, host)
    return replace(plan, fits=fits, devices=devices, stages=tuple(stages), host=host)
