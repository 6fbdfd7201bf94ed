"""Makes a dry run of each rank of a job on fake tensors, without the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from placer.cost import Loss, device_type, updates_together
from placer.emit import StagedModel, emit_stages
from placer.executor.attribution import Attribution
from placer.executor.call_cache import Call
from placer.executor.distributed.job.assignment import Job, RankAssignment, assign_rank
from placer.executor.distributed.job.ownership import build_part, find_ownership
from placer.executor.distributed.messages.batch import gather_result
from placer.executor.distributed.messages.crossings import CrossingFinder, Crossings
from placer.executor.distributed.messages.pipeline import Microbatch, Pipeline
from placer.executor.distributed.messages.transport import NoChannel
from placer.executor.distributed.reduction.gradients import GradientReducer, find_shared_parameters
from placer.executor.place import CALLER, HOST, Place, current_place
from placer.executor.replica import Replica
from placer.executor.scatter import scatter_batch, split_target
from placer.executor.state import CallState, refuse_held_tensors
from placer.executor.statistics import DeferredStatistics, defers_statistics
from placer.operands import tensors_of_tree
from placer.plan.types import Plan
from placer.program import FakeConverter, Program
from placer.program.row_gradients import clear_row_gradients
from placer.schedule import Action, Message, find_messages, linearize, schedule_on
from placer.simulation.ledger import Ledger
from placer.simulation.optimizers import RowUpdates, make_optimizer
from placer.simulation.roles import Role, find_role
from placer.simulation.simulate import (
    counted_loss,
    describe_device,
    running_kernels,
    with_copied_target,
)
from placer.simulation.steps import explained_failure, record_steps
from placer.simulation.types import SimulationReport
from placer.simulation.usage import DeviceTimeline, measure_host, steps_of
from placer.timeline import HostUsage, Moment, StepPosition, Timeline, host_usage, rename_nodes

_CPU = torch.device("cpu")
_RANK = "rank"


@dataclass(frozen=True, eq=False)
class _NoSum:
    """A group of ``size`` ranks in which only this rank exists, so sums change nothing."""

    size: int

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        return lambda: None


class _FakeReducer(GradientReducer):
    """Reduces fake gradients, whose values cannot be read."""

    def _exist_anywhere(self, counts: Tensor) -> list[bool]:
        return [True] * len(counts)


class RankLedger(Ledger):
    """Counts the memory of a process's only device, without the caller's batch.

    By default the device has the kernels of a CPU.
    """

    def __init__(
        self,
        where: Callable[[], StepPosition] = StepPosition,
        *,
        kernels: Callable[[str], str] = lambda place: "cpu",
    ) -> None:
        super().__init__(where, kernels=kernels)

    def _place_of(self, func: Any, leaves: Iterable[Any]) -> str:
        return HOST.name if current_place() is HOST else _RANK

    def add_state(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self.add(tensor, _RANK, kind="parameter")

    @property
    def peak(self) -> Moment:
        """The moment of the rank's highest memory use."""
        return self.timeline().peaks().get(_RANK, Moment())


def simulate_ranks(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    loss: Loss | None = None,
    *,
    run_on: str | None = None,
) -> SimulationReport:
    """The peaks of the first replica's devices when each has a process of its own.

    Each rank's training step (or forward) runs on fake tensors under the plan's schedule; its messages
    are not sent. So the peaks include memory that estimates leave out: received values and their
    gradients, both halves of a split backward, and the buckets in which replicas sum their gradients.
    Raises ``DeviceError`` as `simulate_plan` does.
    """
    devices = {device.device: device for device in plan.devices}
    found = list(rank_timelines(program, plan, inputs, loss, run_on=run_on))
    return SimulationReport(
        devices=tuple(describe_device(devices[name], run, run_on=run_on) for name, run in found),
        host=measure_host(plan.host, ranks_host_usage(plan, [run.timeline for _, run in found])),
        step_ok=True,
    )


def ranks_host_usage(plan: Plan, ranks: Iterable[Timeline]) -> HostUsage:
    """The host memory of all processes of a job together; ``ranks`` are those of the first replica."""
    found = sum((host_usage(timeline, HOST.name) for timeline in ranks), HostUsage())
    return HostUsage(plan.replicas * found.peak, plan.replicas * found.reserved)


def rank_timelines(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    loss: Loss | None = None,
    *,
    run_on: str | None = None,
    once: bool = False,
) -> Iterator[tuple[str, DeviceTimeline]]:
    """For every device of the first replica, its name and the timeline of its process.

    With ``once`` only the first step's forward and backward are run, because later steps differ from it
    only by the optimizer. If inputs keep their gradients, which is another difference, all steps are run.
    """
    replica = _FakeReplica(program, plan, inputs, loss or counted_loss(plan))
    once = once and not any(leaf.requires_grad for leaf in replica.leaves)
    names = list(dict.fromkeys(stage.devices[0] for stage in plan.stages))
    ran: dict[Hashable, tuple[Role, Timeline]] = {}
    for index, name in enumerate(names):
        job = Job(rank=index, world_size=plan.grid.size, local_rank=0)
        assignment, runs_on = assign_rank(plan, job), run_on or name
        role = replica.find_role(assignment, runs_on)
        if role.key not in ran:
            timeline = replica.run_rank(
                assignment, runs_on, steps=steps_of(plan, run_on), once=once
            )
            ran[role.key] = role, timeline
        first, timeline = ran[role.key]
        if first is not role:
            renamed = dict(zip(first.names, role.names, strict=True))
            timeline = rename_nodes(timeline, renamed, program.layer_of)
        yield name, DeviceTimeline(timeline, _RANK)


class _FakeReplica:
    """The first replica on fake tensors; runs one of its ranks at a time.

    The values that cross between stages are found once per type of device, because under autocast their
    dtypes depend on it.
    """

    def __init__(self, program: Program, plan: Plan, inputs: Sequence[Tensor], loss: Loss) -> None:
        self._program, self._plan, self._loss = program, plan, loss
        self._converter = FakeConverter()
        self._model = self._converter.module(program.model)
        self.leaves, self._target = self._converter.tree((list(inputs), loss.target))
        self._staged = emit_stages(program, plan)
        refuse_held_tensors(self._staged)
        with self._converter.running(program.conditions.guess):
            self._batch = batch = scatter_batch(
                self._staged.call,
                self.leaves,
                replicas=plan.replicas,
                microbatches=plan.microbatches,
            )
            own = batch.of_replica(0)
            self._slices = batch.slices[own.start : own.stop]
            targets = split_target(self._target, batch.total, batch.sizes)
            self._targets = targets[own.start : own.stop]
        self._finders: dict[str, CrossingFinder] = {}
        self._messages: dict[str, tuple[list[Action], Sequence[Message]]] = {}
        self._ownership = find_ownership(self._model, self._staged, plan.device_of)

    def _find_crossings(self, name: str) -> tuple[CrossingFinder, list[Crossings]]:
        """The values that cross between stages, as a rank on the device ``name`` finds them."""
        plan, kind = self._plan, device_type(name)
        if kind not in self._finders:
            finder = CrossingFinder(
                self._program.model,
                plan,
                self._staged,
                part=self._model,
                ownership=self._ownership,
                device=_CPU,
            )
            finder.follow()
            self._finders[kind] = finder
        finder = self._finders[kind]
        call = Call(finder.calls.captured, [], None)
        with running_kernels(plan, name):
            return finder, [finder.find(call, s, grad=plan.training) for s in self._slices]

    def find_role(self, assignment: RankAssignment, name: str) -> Role:
        """The role of a rank with the kernels of the device ``name``."""
        plan, staged = self._plan, self._staged
        with self._converter.running(self._program.conditions.guess):
            _, crossings = self._find_crossings(name)
        schedule = plan.schedule if plan.training else "GPipe"
        key = device_type(name)
        if key not in self._messages:
            every = linearize(schedule_on(schedule, assignment.device_of, plan.microbatches))
            order = [
                a
                for a in every
                if a.microbatch_index < len(crossings) and (plan.training or a.kind == "F")
            ]
            self._messages[key] = (
                order,
                find_messages(order, lambda m: crossings[m].flows, assignment.device_of),
            )
        found = find_role(
            self._program,
            plan,
            staged,
            self._ownership,
            assignment,
            crossings,
            *self._messages[key],
        )
        return replace(found, key=(key, found.key))

    def run_rank(
        self,
        assignment: RankAssignment,
        name: str,
        *,
        steps: int,
        once: bool,
    ) -> Timeline:
        """The timeline of ``steps`` steps of one rank, with the kernels of the device ``name``.

        For inference it is that of a forward and the broadcast of its result.
        """
        plan, staged, slices = self._plan, self._staged, self._slices
        ownership = self._ownership
        attribution = Attribution(staged.stages, self._program.layer_of)
        ledger = RankLedger(attribution.where, kernels=lambda _: device_type(name))
        with self._converter.running(self._program.conditions.guess):
            part = build_part(self._model, staged, ownership, assignment.device_index, _CPU)
            pipeline = _pipeline(plan, staged, part, assignment)
            ledger.add_state((*part.parameters(), *part.buffers()))
            for leaf in tensors_of_tree((self.leaves, slices, self._target, self._targets)):
                ledger.add(leaf, CALLER, kind="input")
            finder, crossings = self._find_crossings(name)
            microbatches = _microbatches(staged, slices, crossings, name, part, self._targets)
            explained = explained_failure(self._loss)
            loss_of = with_copied_target(self._loss)
            if not plan.training:
                with explained, ledger, running_kernels(plan, name), torch.no_grad():
                    gather_result(
                        self._batch,
                        pipeline.run(microbatches, None),
                        Call(finder.calls.captured, [], None),
                        finder,
                        assignment=assignment,
                        broadcast=lambda tensor, rank: None,
                    )
                    return ledger.timeline()
            trained = [p for p in part.parameters() if p.requires_grad]
            optimizer = make_optimizer(plan.optimizer, trained, foreach=updates_together([name]))
            group_of = cache(lambda devices: _NoSum(plan.replicas * len(devices)))
            reducer = _FakeReducer(
                find_shared_parameters(part, staged, ownership, assignment.stage_indices, group_of)
            )

            def train() -> None:
                reducer.prepare(len(slices))
                share = 1 / len(slices)
                pipeline.run(
                    microbatches, lambda given, out, _left: loss_of(out, given.target) * share
                )
                reducer.finish()

            rows = RowUpdates(plan.optimizer, trained)

            def update() -> None:
                optimizer.step()
                rows.step()

            def zero_grad() -> None:
                optimizer.zero_grad(set_to_none=True)
                clear_row_gradients(trained)

            with explained, ledger, running_kernels(plan, name):
                return record_steps(
                    ledger,
                    train,
                    update,
                    zero_grad,
                    steps=steps,
                    once=once,
                )


def _pipeline(
    plan: Plan, staged: StagedModel, part: nn.Module, assignment: RankAssignment
) -> Pipeline:
    """The pipeline of one rank, whose messages are not sent."""
    places = [Place(_RANK, _CPU)] * len(plan.stages)
    statistics = DeferredStatistics() if defers_statistics(plan) else None
    return Pipeline(
        Replica(staged, places, places, plan.precision, statistics),
        part,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        rank=assignment.device_index,
        rank_of=assignment.device_of,
        channel=NoChannel(),
    )


def _microbatches(
    staged: StagedModel,
    slices: Sequence[Sequence[Tensor]],
    crossings: Sequence[Crossings],
    name: str,
    model: nn.Module,
    targets: Sequence[Any],
) -> list[Microbatch]:
    """The first replica's micro-batches on the device ``name``."""
    state = CallState(model, {}, [1] * len(slices))
    return [
        Microbatch(
            inputs=state.inputs(staged, slice_, position),
            crossings=crossing,
            inputs_here=torch.device(name).type == "cpu",
            target=target,
        )
        for position, (slice_, crossing, target) in enumerate(
            zip(slices, crossings, targets, strict=True)
        )
    ]
