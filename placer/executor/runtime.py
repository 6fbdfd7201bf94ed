"""Runs the stages of a placed model in one process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only

from placer.emit import StagedModel
from placer.errors import PlacerError
from placer.executor.boxes import Slices, own_boxes
from placer.executor.caller_graph import CallerGraph, shared_graph
from placer.executor.calls.call_cache import Call, CallCache
from placer.executor.calls.program_cache import ProgramCache
from placer.executor.calls.state import CallState
from placer.executor.execute import PlacedMicrobatch, run_forward, run_schedule
from placer.executor.gradient_hooks import hooks_run_once
from placer.executor.hooks import keeping_nothing, refuse_compile, run_forward_hooks
from placer.executor.loss import CombinationFinder, StepLoss
from placer.executor.pickled import model_signature
from placer.executor.places.parameter_copies import ParameterCopies
from placer.executor.places.place import CALLER, Place, is_on
from placer.executor.places.transfer import transfer
from placer.executor.scatter import (
    ScatteredBatch,
    batch_size,
    check_results,
    join_results,
    scatter_batch,
    split_target,
)
from placer.executor.slice_store import stored_for_slice
from placer.executor.stages.replica import Replica
from placer.executor.stages.statistics import (
    DeferredStatistics,
    defers_statistics,
    update_statistics,
)
from placer.executor.stages.tree import renew_buffers, write_back
from placer.executor.watch import StepReport, StepWatch, watching
from placer.executor.whole_batch import check_whole_batch, loss_of_results, step_whole_batch
from placer.operands import tensors_of_tree
from placer.plan.types import Plan
from placer.precision import planned_autocast
from placer.program import (
    CallFormat,
    MethodNotCaptured,
    Stored,
    Target,
    Whole,
    rebuild_call,
    set_flags,
    store,
    unflatten_output,
    unmarked,
)
from placer.schedule import Action, one_process_order
from placer.space import Exchange


class Runtime:
    """Runs the stages of a placed model in one process.

    ``tree`` is the model with its weights on the places of the first replica. Other replicas read copies
    of them. Gradients of all replicas are summed into the one ``.grad``; buffers of the other replicas are
    dropped after each call, as ``nn.DataParallel`` does. ``module`` is the placed module that users have; it
    shares all attributes with ``tree``. ``places`` are those of the shards of each stage of each replica.
    """

    def __init__(
        self,
        tree: nn.Module,
        *,
        plan: Plan,
        staged: StagedModel,
        places: Sequence[Sequence[Sequence[Place]]],
        exchange: Exchange | None = None,
    ) -> None:
        self.tree = tree
        self._module: weakref.ref[nn.Module] = weakref.ref(tree)
        self.plan = plan
        self.staged = staged
        self.statistics = DeferredStatistics() if defers_statistics(plan) else None
        homes = [shards[0] for shards in places[0]]
        self.replicas = tuple(
            Replica(
                *(staged, row, homes, plan.precision, self.statistics, exchange),
                compiled=plan.compile,
            )
            for row in places
        )
        self.calls = CallCache(ProgramCache(tree, plan, staged, planned_autocast(plan.precision)))
        self.signature = model_signature(tree)  # of the model that was planned
        self.combination = CombinationFinder()
        self.report: StepReport | None = None  # of the last step that was measured
        self._checked_hooks: tuple[int, ...] = ()  # those of the model itself, by id
        self._as_written: dict[str, MethodNotCaptured] = {}  # names of methods -> why not captured

    @property
    def module(self) -> nn.Module:
        """The placed module, which holds this."""
        found = self._module()
        assert found is not None
        return found

    @module.setter
    def module(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def programs(self) -> ProgramCache:
        """The programs for the call with which the model was placed."""
        return self.calls.captured

    @property
    def output_device(self) -> torch.device:
        """The device of results."""
        return self.replicas[0].output_place.device

    def accumulating(self) -> AbstractContextManager[None]:
        """In this block, steps do not sum gradients over ranks; one process has nothing to sum."""
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """`PlacedModule.clip_grad_norm_`."""
        return nn.utils.clip_grad_norm_(self.tree.parameters(), max_norm, norm_type)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """`PlacedModule.grad_scaler`."""
        return torch.amp.GradScaler(self.output_device.type, **options)

    def watched(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``step()``, measured for `report`."""
        places = [p for replica in self.replicas for shards in replica.shards for p in shards]
        watch = StepWatch(place.device for place in places)
        with watching(watch):
            loss = step()
        self.report = self._report(watch)
        return loss

    def _report(self, watch: StepWatch) -> StepReport:
        return watch.report(self.plan)

    @property
    def own_share(self) -> tuple[int, int]:
        """``(index, number of shares)``: which share of a batch's rows this process loads."""
        return 0, 1

    @property
    def boxes(self) -> dict[str, Slices]:
        """By the name of an input, a slice per dimension: the part that this process needs."""
        return own_boxes(self.staged, None)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the model's ``forward`` returns for these arguments, on ``output_device``."""
        return self.run(self.calls.find(args, kwargs))

    def call_leaves(self, leaves: list[torch.Tensor]) -> Any:
        """The same for the flattened tensor inputs of the captured call."""
        return self.run(Call(self.programs, leaves, None))

    def call_method(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a method of the model's class besides ``forward``.

        It runs on the placed stages if it is given tensors and calls layers itself; then it is captured at
        its first call, as other calls are. Otherwise it runs as it was written. Raises ``CaptureError`` if it
        then calls layers itself that are on several devices.
        """
        if name not in self._as_written and tensors_of_tree((args, kwargs)):
            refuse_compile()
            try:
                call = self.calls.find(args, kwargs, method=name)
            except MethodNotCaptured as error:
                if error.calls_layers:
                    raise
                self._as_written[name] = error
            else:
                return self.run(call)
        try:
            return function(self.module, *args, **kwargs)
        except RuntimeError as error:
            if name in self._as_written and "on the same device" in str(error):
                raise self._as_written[name] from error
            raise

    def run(self, call: Call) -> Any:
        """The result of a call, and what it leaves behind."""
        programs, leaves = call.programs, call.leaves
        home = self.replicas[0].output_place
        self._set_input_flags(call)
        batch = self._scatter(programs.call, leaves)
        if len(batch.slices) > 1:
            check_results(programs.captured)
        results = []
        with self._deferred_statistics():
            state = CallState(self.tree, call.leaves_by_name, batch.sizes)
            for index, runs in enumerate(self._runs(call, batch, state)):
                for position, run in enumerate(runs):
                    result = run_forward(run, position)
                    results.append(transfer(result, run.replica.output_place, home))
                if index == 0:
                    self._write_back(runs)
        staged = run.replica.staged
        joined = join_results(staged, results, batch.sizes)
        joined = staged.same_objects(joined, call.leaves, self.tree)
        return self._left_behind(staged, joined, call)

    def _left_behind(self, staged: StagedModel, leaves: Sequence[Any], call: Call) -> Any:
        """The result with these leaves, in the caller's own containers; what forward stores is there, too."""
        output = unflatten_output(staged.call, leaves)
        output = self._stored_in(call).with_parts(staged.call.result, output)
        self._store(staged, leaves, call)
        return output

    def _store(self, staged: StagedModel, leaves: Sequence[Any], call: Call) -> None:
        """Leave behind what forward would have left; ``leaves`` are those of the whole batch's result."""
        if staged.stored:
            store(staged.stored, staged.stored_leaves(leaves), self._stored_in(call))

    def _set_flags(self, call: Call, stored: Sequence[Stored]) -> None:
        """Let inputs and parameters require gradients as forward, which stores this, would have set it."""
        if stored:
            set_flags(stored, self._stored_in(call))

    def _set_input_flags(self, call: Call) -> None:
        """The same for inputs only, which must be set before they are split."""
        stored = call.programs.captured.stored
        self._set_flags(call, [each for each in stored if each.root != "model"])

    def _stored_in(self, call: Call) -> Target:
        return Target(model=self.tree, arguments=call.arguments, inputs=call.leaves)

    def _runs(
        self,
        call: Call,
        batch: ScatteredBatch,
        state: CallState,
        targets: Sequence[Any] = (),
        counts: Sequence[float | None] = (),
    ) -> list[list[PlacedMicrobatch]]:
        """For each replica its micro-batches, each with the stages and weights that it needs.

        In a step, ``targets`` and ``counts`` have the target of each slice and what is counted in it.

        All replicas read the weights before any of them runs, because the forward of the first
        replica may write to buffers.
        """
        if call.boxes:
            raise PlacerError(
                "placer.Box",
                "is a part of an input, but one process runs all shards here",
                "pass the whole tensor, as placed.boxes says; torchrun has a process per device",
            )
        programs_of = call.programs.find_all(batch.slices, call.leaves_by_name)
        self._set_flags(call, programs_of[0].stored)
        renew_buffers(self.tree, {name for each in programs_of for name in each.replaced})
        runs: list[list[PlacedMicrobatch]] = []
        for index in range(len(batch.rows)):
            runs.append([])
            copies = ParameterCopies()
            trees: dict[int, tuple[Replica, list[Any]]] = {}
            for position in batch.of_replica(index):
                staged, inputs = programs_of[position], batch.slices[position]
                if id(staged) not in trees:
                    variant = self.replicas[index].with_program(staged)
                    trees[id(staged)] = variant, variant.trees(self.tree, copies)
                variant, found = trees[id(staged)]
                runs[-1].append(
                    PlacedMicrobatch(
                        replica=variant,
                        trees=found,
                        leaves=inputs,
                        inputs=state.inputs(staged, inputs, position),
                        target=targets[position] if targets else None,
                        counted=counts[position] if counts else None,
                        numbers=call.leaves_by_name,
                        replica_index=index,
                    )
                )
        return runs

    def _write_back(self, runs: list[PlacedMicrobatch]) -> None:
        """Store in the model what modules of the first replica's ``runs`` wrote to buffers and attributes."""
        for run in runs:
            for lead, *_ in run.trees:
                write_back(lead)

    @contextmanager
    def _deferred_statistics(self) -> Iterator[None]:
        """At the end of the block, update running statistics once, from all slices that it has run."""
        statistics = self.statistics
        if statistics is None:
            yield
            return
        statistics.clear()
        try:
            yield
        finally:  # also of a part, as in a plain model: torch's checkpoint stops a forward that it repeats
            statistics.set_counters(self.tree)
            update_statistics(self.tree, statistics.take_moments())

    def step_leaves(
        self,
        leaves: list[torch.Tensor],
        *,
        loss_fn: Callable[..., torch.Tensor],
        target: Any = None,
        whole_batch: bool = False,
    ) -> torch.Tensor:
        """`step` for the flattened inputs of the captured call, for a mean over rows or the whole batch."""
        reduction = "auto" if whole_batch else "mean"
        loss_of = StepLoss(loss_fn, reduction=reduction, whole_batch=whole_batch)
        return self.step(Call(self.programs, leaves, None), loss_of=loss_of, target=target)

    def step(
        self,
        call: Call,
        *,
        loss_of: StepLoss,
        target: Any = None,
        own_rows: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one batch; the loss of the whole batch, a detached scalar."""
        # ``own_rows`` makes no difference here: a single process always has all rows.
        programs, leaves = call.programs, call.leaves
        self._set_input_flags(call)
        callers = CallerGraph()
        target = callers.cut(target)
        if loss_of.whole_batch:
            target = Whole(unmarked(target))  # need not have a row per sample
        leaves = callers.cut(leaves)
        batch = self._scatter(programs.call, leaves)
        targets = split_target(target, batch.total, batch.sizes)
        counts = self._count(loss_of, target, targets, batch.total)
        scale = self._scale(scaler)
        losses: list[torch.Tensor] = []
        kept: list[Sequence[Any]] = []
        in_parts = len(batch.slices) > 1 or len(self.plan.stages) > 1
        hooked = self.tree.parameters() if in_parts else ()
        with self._deferred_statistics(), hooks_run_once(hooked):
            state = CallState(self.tree, call.leaves_by_name, batch.sizes, callers.cut)
            replicas = self._runs(call, batch, state, targets, counts)
            staged = replicas[-1][-1].replica.staged
            order = partial(one_process_order, self.plan.schedule, len(self.staged.stages))

            def loss_of_batch(results: list[list[Any]]) -> torch.Tensor:
                whole = replace(replicas[0][0], leaves=leaves, target=unmarked(target))
                found = self._whole_batch_loss(loss_of, scale, whole, results, batch.sizes)
                kept.append(found[1])
                return found[0]

            def after_forward(index: int) -> None:
                if index == 0:
                    self._write_back(replicas[0])

            if loss_of.whole_batch and len(batch.slices) > 1:
                check_whole_batch(staged, self.plan.schedule)
                with _one_graph():
                    losses = [step_whole_batch(replicas, order, loss_of_batch, after_forward)]
            else:
                for index, runs in enumerate(replicas):
                    losses += self._replica_step(runs, order(len(runs)), loss_of, scale, kept)
                    after_forward(index)
        callers.backward()
        home = self.replicas[0].output_place
        if staged.stored:
            self._store(staged, join_results(staged, kept, batch.sizes), call)
        return torch.stack([loss.to(home.device) for loss in losses]).sum()

    def _scale(self, scaler: torch.amp.GradScaler | None) -> float:
        """The factor by which ``scaler`` multiplies a loss at present."""
        if scaler is None:
            return 1.0
        return float(scaler.scale(torch.ones((), device=self.output_device)))

    def _whole_batch_loss(
        self,
        loss_of: StepLoss,
        scale: float,
        whole: PlacedMicrobatch,
        results: list[list[Any]],
        sizes: Sequence[int],
    ) -> tuple[torch.Tensor, list[Any]]:
        """`loss_of_results` with the loss of this step."""

        def loss(given: PlacedMicrobatch, output: Any, left: Sequence[Any]) -> torch.Tensor:
            return self._loss_of_slice(loss_of, given, output, left)

        return loss_of_results(whole, results, sizes, loss, model=self.tree, scale=scale)

    def _replica_step(
        self,
        runs: list[PlacedMicrobatch],
        actions: Sequence[Action],
        loss_of: StepLoss,
        scale: float,
        kept: list[Sequence[Any]],
    ) -> list[torch.Tensor]:
        """Run one replica's micro-batches and return their losses, without ``scale``.

        The leaves of their results, without graphs, are added to ``kept`` if forward stores any. Raises
        ``PlacerError`` if their backwards meet in a graph that was made before the step.
        """

        def loss_of_slice(index: int, result: list[Any]) -> torch.Tensor:
            given = runs[index]
            staged = given.replica.staged
            output = unflatten_output(staged.call, result)
            if not staged.stored:
                return self._loss_of_slice(loss_of, given, output)
            home = self.replicas[0].output_place
            leaves = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            kept.append(transfer(leaves, given.replica.output_place, home))
            with stored_for_slice(staged, result, self.tree):
                return self._loss_of_slice(loss_of, given, output)

        with _one_graph(several=len(runs) > 1 or len(self.replicas) > 1):
            return run_schedule(dict(enumerate(runs)), actions, loss_of_slice, scale=scale)

    def _loss_of_slice(
        self, loss_of: StepLoss, given: PlacedMicrobatch, output: Any, left: Sequence[Any] = ()
    ) -> torch.Tensor:
        """The weighted loss of one micro-batch, whose last stage returned ``output`` and ``left`` behind."""
        call, place = given.replica.staged.call, given.replica.output_place
        if self.module._forward_hooks:
            args, kwargs = rebuild_call(call, given.leaves, given.numbers)
            sliced = self.plan.replicas * self.plan.microbatches > 1 and not loss_of.whole_batch
            hooks = tuple(self.module._forward_hooks) if sliced else self._checked_hooks
            dry_run = any(isinstance(x, FakeTensor) for x in given.leaves)
            known = dry_run or hooks == self._checked_hooks
            with nullcontext() if known else keeping_nothing(self.module):
                output = run_forward_hooks(self.module, args, kwargs, output)
            self._checked_hooks = hooks
        target = given.target
        if not is_on(place.device, target):
            target = transfer(target, CALLER, place)
        rows = batch_size(call, given.leaves)
        return self._call_loss(loss_of, output, target, left, rows=rows, counted=given.counted)

    def _call_loss(
        self, loss_of: StepLoss, output: Any, target: Any, left: Sequence[Any], **given: Any
    ) -> torch.Tensor:
        # A method of its own, because a rank of a job also checks what the loss depends on.
        return loss_of.of_slice(output, target, **given)

    def _count(
        self, loss_of: StepLoss, target: Any, targets: list[Any], total: int | None
    ) -> list[float | None]:
        """Begin the loss of a batch; returns what its normalizer counts in the target of each slice."""
        if len(targets) == 1:
            return [None]
        whole, *counts = loss_of.count([unmarked(target), *targets])
        loss_of.begin(target, rows=total, total=total, counted=whole)
        if whole is not None:
            loss_of.require_count(sum(count or 0.0 for count in counts))
        return counts

    def _scatter(self, call: CallFormat, leaves: list[torch.Tensor]) -> ScatteredBatch:
        return scatter_batch(
            call, leaves, replicas=len(self.replicas), microbatches=self.plan.microbatches
        )


@contextmanager
def _one_graph(*, several: bool = True) -> Iterator[None]:
    """Explain that backwards of ``several`` slices meet in a graph that was made before the step."""
    try:
        yield
    except RuntimeError as error:
        if several and "through the graph a second time" in str(error):
            raise shared_graph() from error
        raise
