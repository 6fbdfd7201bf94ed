"""Makes a dry run of each rank of a job on fake tensors, without the other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from placer.emit import StagedModel, emit_stages
from placer.executor.calls.call_cache import Call
from placer.executor.calls.state import CallState, refuse_kept_on_some_ranks
from placer.executor.distributed.job.assignment import Job, RankAssignment, assign_rank
from placer.executor.distributed.job.ownership import build_part, find_ownership
from placer.executor.distributed.messages.batch import gather_result
from placer.executor.distributed.messages.crossings import CrossingFinder, Crossings, TensorSpec
from placer.executor.distributed.messages.pipeline import Pipeline
from placer.executor.distributed.messages.transport import NoChannel
from placer.executor.distributed.reduction.gradients import GradientReducer, find_shared_parameters
from placer.executor.distributed.reduction.pieces import Pieces
from placer.executor.execute import MicrobatchRun
from placer.executor.places.place import CALLER, HOST, Place, current_place, on
from placer.executor.places.transfer import receive
from placer.executor.scatter import join_results, scatter_batch, split_target
from placer.executor.stages.attribution import Attribution
from placer.executor.stages.replica import Replica
from placer.executor.stages.statistics import DeferredStatistics, defers_statistics
from placer.executor.whole_batch import check_whole_batch
from placer.machine.devices import device_type
from placer.operands import tensors_of_tree
from placer.plan.types import Plan
from placer.program import unflatten_output
from placer.program.objects.copying import is_tree
from placer.schedule import Action, Message, find_messages, linearize, schedule_on
from placer.simulation.ledger import Ledger
from placer.simulation.roles import Role, find_role
from placer.simulation.steps import FakeCall, Process, running_kernels
from placer.simulation.usage import DeviceTimeline
from placer.space import Alone, own_parts, similar_shards
from placer.state_layout import sharing_replicas
from placer.timeline import Timeline, rename_nodes

_CPU = torch.device("cpu")
_RANK = "rank"


@dataclass(frozen=True, eq=False)
class _NoSum:
    """A group of ``size`` ranks in which only this rank exists, so that messages change nothing."""

    size: int
    rank: int

    def start_sum(self, tensor: Tensor) -> Callable[[], object]:
        return lambda: None

    def start_scatter(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        return lambda: None

    def start_gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        return lambda: None


class _FakeReducer(GradientReducer):
    """Reduces fake gradients, whose values cannot be read."""

    def _exist_anywhere(self, counts: Tensor) -> list[bool]:
        return [True] * len(counts)


class RankLedger(Ledger):
    """Counts the memory of a process's only device, without the caller's batch."""

    def _place_of(self, func: Any, leaves: Iterable[Any], kwargs: Any) -> str:
        return HOST.name if current_place() is HOST else _RANK

    def add_state(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self.add(tensor, _RANK, kind="parameter")


def run_ranks(call: FakeCall, positions: Sequence[int]) -> list[DeviceTimeline]:
    """For devices of the first replica, given by their ``positions``, the timelines of their processes.

    Of ranks with the same role only one is run, and of shards that take as much memory.
    """
    replica, plan = _FakeReplica(call), call.plan
    ran: dict[Hashable, tuple[Role, Timeline]] = {}
    found = []
    rows = dict.fromkeys(plan.devices_of(stage, 0) for stage in plan.stages)
    similar = similar_shards(call.program)
    names = [name for row in rows for name in row]
    coordinates = list(itertools.product(range(len(rows)), similar))
    ranks = []
    for at in positions:
        stage, shard = coordinates[at]
        rank = plan.grid.rank(pp=stage, sp=shard)
        job = Job(rank=rank, world_size=plan.grid.size, local_rank=0)
        ranks.append((assign_rank(plan, job), call.run_on or names[at]))
    with call.running():
        roles = [replica.find_role(*rank) for rank in ranks]
    for (assignment, device), role in zip(ranks, roles, strict=True):
        if role.key not in ran:
            ran[role.key] = role, replica.run_rank(assignment, device)
        first, timeline = ran[role.key]
        if first is not role:
            renamed = dict(zip(first.names, role.names, strict=True))
            stages = dict(zip(first.stages, role.stages, strict=True))
            timeline = rename_nodes(timeline, renamed, call.program.layers, stages)
        found.append(DeviceTimeline(timeline, _RANK))
    return found


class _FakeReplica:
    """The first replica on fake tensors; runs one of its ranks at a time.

    The values that cross between stages are found once per type of device, because under autocast their
    dtypes depend on it.
    """

    def __init__(self, call: FakeCall) -> None:
        self._call, self._plan = call, call.plan
        self._staged = staged = emit_stages(call.program, call.plan, together=False)
        refuse_kept_on_some_ranks(staged)
        if call.whole_batch:
            check_whole_batch(staged, call.plan.schedule)
        self._ownership = find_ownership(call.model, staged, call.plan.device_of)
        with call.running():
            self._batch = batch = scatter_batch(
                staged.call,
                call.leaves,
                replicas=call.plan.replicas,
                microbatches=call.plan.microbatches,
                only_first=True,
            )
            own = batch.of_replica(0)
            self._slices = batch.slices[own.start : own.stop]
            targets = split_target(call.target, batch.total, batch.sizes)
            self._targets = targets[own.start : own.stop]
        self._tree = is_tree(call.model)
        self._absent: dict[str, Tensor] = {}  # the tensors that a rank does not have
        self._finder = cache(self._make_finder)
        self._find_messages = cache(self._messages)
        self._find_crossings = cache(self._crossings)

    def _make_finder(self, kind: str, shard: int) -> CrossingFinder:
        """Finds the values that cross between stages, as a rank on a device of type ``kind`` does."""
        finder = CrossingFinder(
            self._call.program.model,
            self._plan,
            self._staged,
            part=self._call.model,
            ownership=self._ownership,
            device=_CPU,
            shard=shard,
        )
        finder.follow()
        return finder

    def _crossings(self, kind: str, shard: int) -> list[Crossings]:
        """The values that cross between stages, for every micro-batch."""
        finder = self._finder(kind, shard)
        call = Call(finder.calls.captured, [], None)
        with running_kernels(self._plan, kind):
            return [finder.find(call, s, grad=self._plan.training) for s in self._slices]

    def _messages(self, kind: str) -> tuple[Sequence[Action], Sequence[Message]]:
        """The actions and messages of all ranks in a step, or for inference in a forward."""
        plan, crossings = self._plan, self._find_crossings(kind, 0)
        schedule = plan.schedule if plan.training else "GPipe"
        order = [
            action
            for action in linearize(schedule_on(schedule, plan.device_of, plan.microbatches))
            if action.microbatch_index < len(crossings) and (plan.training or action.kind == "F")
        ]
        return order, find_messages(order, lambda m: crossings[m].flows, plan.device_of)

    def find_role(self, assignment: RankAssignment, device: str) -> Role:
        """The role of a rank with the kernels of ``device``. Call it while fake tensors run."""
        kind = device_type(device)
        found = find_role(
            self._call.program,
            self._plan,
            self._staged,
            self._ownership,
            assignment,
            self._find_crossings(kind, assignment.shard_index),
            *self._find_messages(kind),
        )
        return replace(found, key=(kind, assignment.shard_index, found.key))

    def run_rank(self, assignment: RankAssignment, device: str) -> Timeline:
        """The timeline of one rank with the kernels of ``device``.

        For inference it is that of a forward and the broadcast of its result.
        """
        call, plan, staged = self._call, self._plan, self._staged
        kind = device_type(device)
        attribution = Attribution(call.program.layers)
        ledger = RankLedger(attribution.where, kernels=lambda _: kind)

        def group_of(devices: tuple[int, ...]) -> _NoSum:
            ranks = plan.grid.ranks_of(devices)
            return _NoSum(len(ranks), ranks.index(assignment.rank))

        def sharing(devices: tuple[int, ...]) -> _NoSum:
            replica = plan.grid.coordinates(assignment.rank).dp
            replicas = sharing_replicas(replica, plan.shard_over or plan.replicas)
            ranks = plan.grid.ranks_of(devices, replicas)
            return _NoSum(len(ranks), ranks.index(assignment.rank))

        with call.running():
            part = build_part(
                call.model,
                staged,
                self._ownership,
                assignment.device_index,
                _CPU,
                absent=self._absent,
                tree=self._tree,
            )
            ledger.add_state((*part.parameters(), *part.buffers()))
            shard = assignment.shard_index
            slices = [own_parts(call.program, each, shard) for each in self._slices]
            for leaf in tensors_of_tree((call.leaves, slices, call.target, self._targets)):
                ledger.add(leaf, CALLER, kind="input")
            pipeline = _pipeline(plan, staged, part, assignment)
            state = CallState(part, {}, [1] * len(slices), whole=call.model)
            crossings = self._find_crossings(kind, assignment.shard_index)
            microbatches = [
                pipeline.place(
                    each.staged,
                    state.inputs(staged, slice_, position),
                    are_here=kind == "cpu",
                    leaves=(),
                    target=target,
                )
                for position, (slice_, each, target) in enumerate(
                    zip(slices, crossings, self._targets, strict=True)
                )
            ]
            trained = [p for p in part.parameters() if p.requires_grad]
            shared = find_shared_parameters(
                part,
                staged,
                self._ownership,
                assignment.stage_indices,
                cache(group_of),
                cache(sharing),
                None,
            )
            divided = plan.microbatches if plan.shard_state == "gradients" else None
            reducer = _FakeReducer(shared, divided=divided)
            pieces = Pieces([] if plan.shard_state == "none" else shared)

            def infer() -> None:
                finder = self._finder(kind, assignment.shard_index)
                gather_result(
                    self._batch,
                    pipeline.run(microbatches, crossings, None),
                    Call(finder.calls.captured, [], None),
                    finder,
                    assignment=assignment,
                    broadcast=lambda tensor, rank: None,
                )

            def train() -> None:
                reducer.prepare(len(slices))
                share = 1 / len(slices)
                if call.whole_batch:
                    batch_loss = partial(self._loss_of_batch, kind, assignment.shard_index)
                    pipeline.run(microbatches, crossings, None, loss_of_batch=batch_loss)
                else:
                    pipeline.run(
                        microbatches,
                        crossings,
                        lambda given, out, _left: call.loss_fn(out, given.target) * share,
                    )
                reducer.finish()

            process = Process(
                ledger=ledger,
                infer=infer,
                train=train,
                trained={device: trained},
                updating=nullcontext,
                stepping=lambda: pieces.updating(trained),
            )
            return call.record(process, device)

    def _loss_of_batch(self, kind: str, shard: int, runs: Sequence[MicrobatchRun]) -> list[Tensor]:
        """The loss over the results of ``runs``, and of replicas whose results the first one receives."""
        place, batch, staged = Place(_RANK, _CPU), self._batch, self._staged
        finder = self._finder(kind, shard)
        results = [run.receive_result(place) for run in runs]
        for inputs in batch.slices[len(runs) :]:
            of_slice = finder.find(Call(finder.calls.captured, [], None), inputs, grad=True).result
            results.append([_received(leaf, place) for leaf in of_slice])
        with on(place):
            joined = join_results(staged, results, batch.sizes)
            results.clear()
            output = unflatten_output(staged.call, joined)
            del joined
            loss = self._call.loss_fn(output, self._call.target)
            del output
            loss.backward()
        return [loss.detach()]


def _received(leaf: Any, place: Place) -> Any:
    """A leaf of another replica's result, of which there is only the ``TensorSpec`` here."""
    if not isinstance(leaf, TensorSpec):
        return leaf
    tensor = torch.empty(leaf.shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)
    return receive(tensor, place, place, lambda gradient: None) if leaf.requires_grad else tensor


def _pipeline(
    plan: Plan, staged: StagedModel, part: nn.Module, assignment: RankAssignment
) -> Pipeline:
    """The pipeline of one rank, whose messages are not sent."""
    place = Place(_RANK, _CPU)
    homes, shards = [place] * len(plan.stages), [[place]] * len(plan.stages)
    statistics = DeferredStatistics() if defers_statistics(plan) else None
    exchange = Alone(plan.shards, assignment.shard_index) if plan.shards > 1 else None
    return Pipeline(
        Replica(staged, shards, homes, plan.precision, statistics, exchange),
        part,
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        rank=assignment.device_index,
        rank_of=assignment.device_of,
        channel=NoChannel(),
    )
