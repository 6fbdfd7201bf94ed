"""Runs this rank's stages of a placed model, in a job with one process per device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer._torch import default_timeout
from placer.emit import StagedModel
from placer.errors import PlacerError, StageError
from placer.executor.boxes import Slices, own_boxes
from placer.executor.caller_graph import CallerGraph
from placer.executor.calls.call_cache import Call
from placer.executor.distributed.checks import (
    check_inference,
    check_parameters,
    check_scaler,
    check_training,
)
from placer.executor.distributed.connection import Connection
from placer.executor.distributed.failures.broadcast import FailureBroadcast
from placer.executor.distributed.job.assignment import RankAssignment
from placer.executor.distributed.job.call_check import CallCheck, CallDescription, Method
from placer.executor.distributed.job.groups import (
    Groups,
    connect,
    gather_objects,
    make_groups,
    make_mesh,
)
from placer.executor.distributed.job.ownership import Ownership
from placer.executor.distributed.loss_leaves import gradient_nodes, refuse_other_leaves
from placer.executor.distributed.messages.batch import (
    Share,
    count_rows,
    find_input_readers,
    gather_result,
    take_share,
)
from placer.executor.distributed.messages.crossings import CrossingFinder, Crossings, find_pairs
from placer.executor.distributed.messages.exchange import GroupExchange
from placer.executor.distributed.messages.pipeline import LossOf, LossOfBatch, Pipeline, Results
from placer.executor.distributed.messages.transport import GroupChannel
from placer.executor.distributed.messages.whole_batch import FirstReplica, loss_over_replicas
from placer.executor.distributed.reduction.inputs import sum_input_gradients
from placer.executor.distributed.reduction.norms import moments_of_replicas, synchronise_norms
from placer.executor.distributed.reduction.pieces import Pieces
from placer.executor.distributed.reduction.rank_gradients import RankGradients
from placer.executor.distributed.reduction.step_reduction import LossReduction, SharedTensors
from placer.executor.execute import MicrobatchRun, PlacedMicrobatch
from placer.executor.gradient_hooks import hooks_run_once
from placer.executor.loss import StepLoss
from placer.executor.module import runtime_of
from placer.executor.places.place import Place
from placer.executor.runtime import Runtime
from placer.executor.scatter import batch_size, check_target
from placer.executor.stages.segment_state import tensors_at
from placer.executor.stages.statistics import Moments, NormCall, update_statistics
from placer.executor.watch import StepReport, StepWatch, is_measured, joined
from placer.executor.whole_batch import check_whole_batch
from placer.generators import own_random_state
from placer.plan.types import Plan
from placer.precision import autocast_state
from placer.program import Program, Whole, unmarked

# A call may have so many more inputs than that of ``compile`` until their values are compared as one.
_MORE_INPUTS = 8


class DistributedRuntime(Runtime):
    """Runs one rank's stages of a placed model; see `placer.executor.distributed`.

    ``part`` has the parameters and buffers of this rank, already on ``device``. All ranks of the job
    construct it together, with the same ``name``, which no other module has.
    """

    stages_run: ClassVar[bool] = False  # do stages of any placed model run?

    def __init__(
        self,
        part: nn.Module,
        *,
        program: Program,
        plan: Plan,
        staged: StagedModel,
        ownership: Ownership,
        assignment: RankAssignment,
        device: torch.device,
        name: str,
    ) -> None:
        place = Place(str(device), device)
        groups = make_groups(
            assignment.grid, ownership, device, shard_over=plan.shard_over or plan.replicas
        )
        exchange = None
        if groups.sp is not None:
            over_replicas = plan.batch_norm == "sync" and plan.replicas > 1
            exchange = GroupExchange(groups.sp, device, groups.dp if over_replicas else None)
        places = [[[place]] * len(staged.stages)]
        super().__init__(part, plan=plan, staged=staged, places=places, exchange=exchange)
        self.exchange = exchange  # with the other shards of its stages
        self.has_warned_of_others = False  # that state_dict() lacks the tensors of other ranks
        self.assignment = assignment
        self.device = device
        self.mesh = make_mesh(groups, assignment.grid, device)
        self.ownership = ownership
        self.finder = CrossingFinder(
            program.model,
            plan,
            staged,
            part=part,
            ownership=ownership,
            device=device,
            shard=assignment.shard_index,
        )
        self.finder.check_flags(staged)
        # Those of the whole model; this rank's part cannot be captured.
        self.calls = self.finder.calls
        connect(groups, find_pairs(staged, assignment.device_of), device)
        self._connection = Connection(
            groups,
            FailureBroadcast(
                assignment.rank, dist.get_world_size(), name, limit=default_timeout(device)
            ),
            rank=assignment.rank,
            replica_index=assignment.replica_index,
            layers=[stage.layers for stage in plan.stages],
        )
        if plan.batch_norm == "sync" and plan.replicas > 1:
            synchronise_norms(part, groups.columns)
        # Shards, and norms that are synchronised, by the plan or by the user.
        self._communicates_in_forward = exchange is not None or any(
            vars(module).get("process_group") for module in part.modules()
        )
        self._readers: tuple[StagedModel, Mapping[str, Sequence[int]]] | None = None
        self._pipeline = Pipeline(
            self.replicas[0],
            part,
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            rank=assignment.device_index,
            rank_of=assignment.device_of,
            channel=GroupChannel(groups.pp),
            layer_of=plan.node_layers,
        )
        self.placeholder = nn.Parameter(torch.empty(0, device=device))
        self.gradients = RankGradients(
            part,
            plan=plan,
            staged=staged,
            ownership=ownership,
            assignment=assignment,
            connection=self._connection,
        )
        self._frozen = frozenset(n for n, p in part.named_parameters() if not p.requires_grad)

    @property
    def process_groups(self) -> Groups:
        """The process groups of this module. Raises ``PeerError`` if they are closed."""
        return self._connection.groups

    @property
    def own_share(self) -> tuple[int, int]:
        return self.assignment.replica_index, self.plan.replicas

    @property
    def boxes(self) -> dict[str, Slices]:
        shard = self.assignment.shard_index if self.plan.shards > 1 else None
        return own_boxes(self.staged, shard)

    @property
    def output_device(self) -> torch.device:
        return self.device

    @property
    def tensor_names(self) -> Mapping[str, str]:
        """For each name of a tensor on this rank, the first of the tensor's names in the model."""
        names = self.ownership.names[self.assignment.device_index]
        return {name: self.ownership.first_name[name] for name in names}

    @property
    def owned_names(self) -> frozenset[str]:
        """The first names of the tensors that this rank saves; each has one owner in the job."""
        index, holders = self.assignment.device_index, self.ownership.holders
        if self.assignment.replica_index or self.assignment.shard_index:
            return frozenset()
        return frozenset(name for name, found in holders.items() if found[0] == index)

    @property
    def _last_device(self) -> int:
        """The index in a replica of the device that runs the last stage."""
        return self.assignment.device_of[-1]

    @property
    def _loss_rank(self) -> int:
        """The rank of the first replica whose losses count."""
        return self.assignment.grid.rank(pp=self._last_device)

    @property
    def _has_losses(self) -> bool:
        """Whether this rank runs the last stage and so computes losses."""
        return self.assignment.device_index == self._last_device

    def run(self, call: Call) -> Any:
        """The result for the whole batch, on every rank."""
        leaves = call.leaves
        check_inference(leaves, training=self.module.training)
        leaves = [leaf.detach() for leaf in leaves]
        call = call._replace(boxes={i: box.detach() for i, box in call.boxes.items()})
        with torch.no_grad(), self._own_random_state(), self.watch():
            agreement = self._ask(call, "placed(x)", leaves)
            with self._agreed(agreement):
                share = self._take_share(call, leaves, grad=False)
                results = self._execute(share, None, agreement)
            moments = self._moments_of_replicas()
            # Freed before the result takes memory
            self._share_written(share.largest, moments).wait()
            update_statistics(self.tree, moments)
            staged, result = self._gather(call, share, results, own_rows=False, grad=False)
            return self._left_behind(staged, result, call)

    def step(
        self,
        call: Call,
        *,
        loss_of: StepLoss,
        target: Any = None,
        own_rows: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        self._set_input_flags(call)
        programs, leaves = call.programs, call.leaves
        is_sliced = self.plan.replicas * self.plan.microbatches > 1
        together = loss_of.whole_batch and is_sliced
        self._check_step(call, scaler, together=together, own_rows=own_rows)
        callers = CallerGraph()
        leaves, target, boxes = callers.cut((leaves, target, dict(call.boxes)))
        call = call._replace(boxes=boxes)
        if loss_of.whole_batch and not own_rows:
            target = Whole(unmarked(target))  # need not have a row per sample
        rows = batch_size(programs.call, leaves)
        with self._connection.told():
            parameters = dict(self.tree.named_parameters())
            trained = check_parameters(parameters, self.tensor_names, self._frozen)
            self.gradients.refuse_hooks(trained)
            check_target(target, rows)
            count = loss_of.count if self._has_losses and is_sliced else None
            counted = None if count is None else count([unmarked(target)])[0]
            agreement = self._ask(
                call,
                "placed.step",
                leaves,
                target=target,
                own_rows=own_rows,
                counted=counted,
                reduction=loss_of.reduction,
                normalizer=loss_of.has_normalizer,
                whole_batch=loss_of.whole_batch,
                profile=is_measured(),
                accumulate=self.gradients.are_accumulated,
                scaler=scaler is not None,
                count=partial(
                    count_rows,
                    own_rows=own_rows,
                    replicas=self.plan.replicas,
                    together=self.plan.batch_norm == "sync",
                ),
            )

        def begin() -> None:
            agreement.wait()
            loss_of.begin(target, rows=rows, total=agreement.total, counted=agreement.counted)

        def loss_of_slice(given: PlacedMicrobatch, output: Any, left: Sequence[Any]) -> Tensor:
            begin()
            return self._loss_of_slice(loss_of, given, output, left)

        def loss_of_batch(runs: Sequence[MicrobatchRun]) -> list[Tensor]:
            begin()
            return self._loss_over_replicas(
                loss_of, scale, runs, share, call, leaves, target, own_rows=own_rows
            )

        with self._own_random_state(), self._agreed(agreement):
            share = self._take_share(
                call, leaves, target=target, count=count, own_rows=own_rows, grad=True
            )
            # Every shard computes the loss; gradients are sums over shards.
            scale = self._scale(scaler) / self.plan.shards
            reducer = self.gradients.reducer(trained)
            with hooks_run_once(
                parameters.values(), keep=reducer.hook_ids, explain=self._hook_failure
            ):
                reducer.prepare(len(share.microbatches), sums=not self.gradients.are_accumulated)
                results = self._execute(
                    share,
                    None if together else loss_of_slice,
                    agreement,
                    loss_of_batch=loss_of_batch if together else None,
                    scale=scale,
                )
                begin()  # also where no losses are computed
                if not self.gradients.are_accumulated:
                    reducer.send_rest()  # before the next messages, which use the same groups
                losses = LossReduction(
                    [] if self.assignment.shard_index else results.losses,
                    loss_of=loss_of,
                    source=self._loss_rank if self.plan.replicas == 1 else None,
                    world=self.process_groups.world,
                    device=self.device,
                )
                moments = self._moments_of_replicas()
                written = self._share_written(share.largest, moments)
                if not self.gradients.are_accumulated:
                    reducer.finish()
            if share.largest.staged.stored and share.microbatches:
                self._store_of_step(call, share, results, own_rows=own_rows)
        with self.watch():
            loss = losses.wait()
            sum_input_gradients(
                leaves,
                [dim is not None for dim in programs.call.batch_dims],
                boxes,
                self.process_groups,
                own_rows=own_rows,
                device=self.device,
            )
            callers.backward()
            written.wait()
            update_statistics(self.tree, moments)
            losses.check()
            return loss

    def _check_step(
        self, call: Call, scaler: torch.amp.GradScaler | None, *, together: bool, own_rows: bool
    ) -> None:
        """Raise ``PlacerError`` for a step that cannot be made.

        Before any communication, so that a rank that is called alone raises without waiting. ``together``
        says that the loss is one over several slices.
        """
        check_training()
        check_scaler(scaler, num_devices=self.assignment.num_devices)
        if together:
            check_whole_batch(call.programs.captured, self.plan.schedule)
            if own_rows and self.module._forward_hooks:
                raise PlacerError(
                    "whole_batch",
                    "hooks on the placed module would get the inputs of one replica and results of all",
                    "give every rank the whole batch, without own_rows",
                )
        if call.boxes and self.module._forward_hooks:
            raise PlacerError(
                "placer.Box",
                "is a part of an input, and hooks on the placed module would get the whole one",
                "pass the whole tensor, or remove the hooks",
            )

    def _loss_over_replicas(
        self,
        loss_of: StepLoss,
        scale: float,
        runs: Sequence[MicrobatchRun],
        share: Share,
        call: Call,
        leaves: Sequence[Tensor],
        target: Any,
        *,
        own_rows: bool,
    ) -> list[Tensor]:
        """One loss over the results of all replicas, on the first; ``runs`` get their gradients."""
        whole = PlacedMicrobatch(
            replica=self.replicas[0].with_program(share.largest.staged),
            trees=[],
            leaves=leaves,
            inputs={},
            target=target,
            numbers=call.leaves_by_name,
        )
        return loss_over_replicas(
            FirstReplica(group=self.process_groups.columns, device=self.device),
            runs,
            [batch_size(call.programs.call, each.leaves) or 1 for each in share.microbatches],
            whole,
            lambda *given: self._whole_batch_loss(loss_of, scale, *given)[0],
            own_rows=own_rows,
        )

    def _store_of_step(self, call: Call, share: Share, results: Results, *, own_rows: bool) -> None:
        """Leave behind on every rank what forward would have left, for the rows that the rank was given."""
        staged, leaves = self._gather(call, share, results, own_rows=own_rows, grad=True)
        with torch.no_grad():
            self._store(staged, leaves, call)

    def _store(self, staged: StagedModel, leaves: Sequence[Any], call: Call) -> None:
        super()._store(staged, leaves, call)
        self.finder.store(staged, staged.stored_leaves(leaves))

    def _gather(
        self, call: Call, share: Share, results: Results, *, own_rows: bool, grad: bool
    ) -> tuple[StagedModel, list[Any]]:
        """The leaves of the result for the rows that the ranks were given, on every rank."""
        group = self.process_groups.row if own_rows else self.process_groups.world
        return gather_result(
            share.batch,
            results,
            call,
            self.finder,
            assignment=self.assignment,
            broadcast=partial(dist.broadcast, group=group),
            own_rows=own_rows,
            grad=grad,
        )

    def _hook_failure(self, parameter: Tensor, error: Exception) -> StageError:
        """The error for a hook on the gradient of ``parameter`` that raised ``error``."""
        name = next(n for n, p in self.tree.named_parameters() if p is parameter)
        layer, rank = name.rpartition(".")[0] or name, self.assignment.rank
        replica = self.assignment.replica_index
        reads = (i for i in self.assignment.stage_indices if name in self.staged.stages[i].state)
        stage = next(reads, self.assignment.stage_indices[0])
        return StageError(
            f"stage {stage}, layer {layer!r}, rank {rank} (replica {replica}), backward",
            f"{type(error).__name__}: {error}",
            f"a hook on the gradient of {name!r} raised the exception above",
            stage=stage,
            layer=layer,
            rank=rank,
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        self.gradients.require_sums("clip_grad_norm_")
        norm_type = float(norm_type)
        self.announce("placed.clip_grad_norm_", max_norm=float(max_norm), norm_type=norm_type)
        return self.gradients.clip(max_norm, norm_type, self.device)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(self.device.type, **options)

    def _report(self, watch: StepWatch) -> StepReport:
        own = watch.report(self.plan, rank=self.assignment.rank)
        return joined(gather_objects(own, self.process_groups.world))

    def announce(self, method: Method, **options: object) -> None:
        """Check that all ranks call ``method`` with the same ``options``, before they communicate in it.

        Without this check, a rank in another call could wait for ever or receive a message of another
        size. Raises ``PlacerError`` on all ranks if any calls another method or has other options.
        """
        with self.watch():
            self._agree(CallDescription(method=method, options=options), {}).wait()

    @contextmanager
    def _agreed(self, agreement: CallCheck) -> Iterator[None]:
        """Tell the other ranks of a failure in the block, and close the connections.

        That the calls of the ranks do not match, or that one was lost before it made its call, is the error
        in place of what it led to.
        """
        with self._connection.told():
            try:
                yield
            except Exception:
                agreement.wait()
                raise

    def _agree(
        self,
        called: CallDescription,
        readers: Mapping[str, Sequence[int]],
        count: Callable[..., int | None] | None = None,
    ) -> CallCheck:
        self.gradients.require_whole()
        if self.stages_run and self.assignment.grid.size > 1:
            raise PlacerError(
                called.method,
                "is called while stages run, by loss_fn or a hook; other ranks do not run it there",
                "call it before or after the step, on all ranks: what loss_fn needs of it can be in target=…",
            )
        return CallCheck(
            called,
            room=len(self.staged.graph_inputs) + _MORE_INPUTS,
            replicas=self.assignment.replicas,
            readers=readers,
            last=self.assignment.positions(self._last_device)[0],
            world=self.process_groups.world,
            device=self.device,
            count=count,
        )

    def _ask(
        self,
        asked: Call,
        method: Method,
        leaves: Sequence[Tensor],
        *,
        count: Callable[[Sequence[int]], int | None] | None = None,
        target: Any = None,
        own_rows: bool = False,
        counted: float | None = None,
        **options: object,
    ) -> CallCheck:
        """Start to check that all ranks make the same call; this rank can prepare in the meantime."""
        call, staged = asked.programs.call, asked.programs.captured
        captured = asked.programs is self.programs  # if not, constants are plain values
        tensors = {each.name for each in call.inputs}
        plain = [n for n in call.leaf_names if n not in tensors]
        options["arguments"] = (
            None if captured else [call.batch_dims, *((n, asked.leaves_by_name[n]) for n in plain)]
        )
        called = CallDescription(
            method=method,
            inputs=dict(zip(staged.graph_inputs, leaves, strict=False)),
            target=unmarked(target),
            rows=batch_size(call, leaves),
            own_rows=own_rows,
            counted=counted,
            options={
                "inputs with gradients of a placer.Box": [
                    call.inputs[i].name for i, x in sorted(asked.boxes.items()) if x.requires_grad
                ],
                "mode": "train" if self.module.training else "eval",
                "autocast": autocast_state(self.device.type),
                **options,
            },
        )
        if self._readers is None or self._readers[0] is not staged:
            self._readers = staged, find_input_readers(staged, self.assignment)
        return self._agree(called, self._readers[1], count)

    def _take_share(self, call: Call, leaves: Sequence[Tensor], **options: Any) -> Share:
        self.finder.follow()
        ways = self.finder, self._pipeline, self.plan, self.assignment
        return take_share(call, leaves, *ways, **options)

    def _call_loss(
        self, loss_of: StepLoss, output: Any, target: Any, left: Sequence[Any], **given: Any
    ) -> Tensor:
        before = gradient_nodes(output, left)
        loss = super()._call_loss(loss_of, output, target, left, **given)
        if self.assignment.grid.size > 1:
            # A loss over the whole batch is computed once, outside of the slices' backwards.
            whole = self.assignment.num_devices == 1 and not loss_of.whole_batch
            refuse_other_leaves(loss, before, self.tree, whole=whole)
        return loss

    def _execute(
        self,
        share: Share,
        loss_of: LossOf | None,
        agreement: CallCheck,
        *,
        loss_of_batch: LossOfBatch | None = None,
        scale: float = 1.0,
    ) -> Results:
        """Run this rank's stages; the first forward runs while the calls of all ranks are compared."""
        if self.statistics is not None:
            self.statistics.clear()
        if self._communicates_in_forward:
            agreement.wait()
        DistributedRuntime.stages_run = True
        try:
            return self._pipeline.run(
                share.microbatches,
                share.crossings,
                loss_of,
                loss_of_batch=loss_of_batch,
                ready=agreement.wait,
                scale=scale,
            )
        finally:
            DistributedRuntime.stages_run = False

    def _moments_of_replicas(self) -> Mapping[NormCall, Moments]:
        """The statistics of norms in all replicas, if running statistics are updated once per step."""
        if self.statistics is None:
            return {}
        self.statistics.set_counters(self.tree)
        own, place = self.statistics.take_moments(), self.replicas[0].places[0]
        group = self.process_groups.dp
        return moments_of_replicas(own, group=group, copies=self.plan.shards, place=place)

    def _share_written(self, largest: Crossings, moments: Collection[NormCall]) -> SharedTensors:
        """Start to send what forward wrote in the first replica to all replicas: buffers and parameters.

        This is what ``nn.DataParallel`` does with buffers. Running statistics that all replicas update from
        the same ``moments`` are not sent.
        """
        names: set[str] = set()
        if self.plan.replicas > 1:
            stages = [largest.staged.stages[index] for index in self.assignment.stage_indices]
            names = {name for s in stages for segment in s.segments for name in segment.written}
            names -= {name for call in moments for name in (call.mean, call.var)}
        written = [tensor for _, tensor in tensors_at(self.tree, sorted(names))]
        return SharedTensors(written, self.process_groups.dp)

    def _own_random_state(self) -> Any:
        return own_random_state(
            self.device, self.assignment.replica_index, self.assignment.device_index
        )

    @property
    def pieces(self) -> Pieces:
        """The pieces of parameters that optimizers update here; none unless their state is sharded."""
        return self.gradients.pieces

    def accumulating(self) -> AbstractContextManager[None]:
        return self.gradients.accumulating()

    def watch(self) -> AbstractContextManager[None]:
        """In this block, a failure is told to the other ranks and ends the connection to them.

        Raises ``PeerError`` for a failed communication. A ``PlacerError`` is raised as it is and not
        told, because all ranks raise it.
        """
        return self._connection.watch()


def runtime_of_rank(module: nn.Module) -> DistributedRuntime:
    """The runtime of a rank's part of a placed model."""
    return cast(DistributedRuntime, runtime_of(module))
