"""`PlacedModule`, an ``nn.Module`` that runs the stages of a placed model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from placer.emit import StagedModel
from placer.executor.caller_graph import CallerGraph, shared_graph
from placer.executor.execute import PlacedMicrobatch, run_forward, run_schedule
from placer.executor.gradient_hooks import hooks_run_once
from placer.executor.hooks import (
    compile_error,
    refuse_backward_hooks,
    refuse_compile,
    run_forward_hooks,
    run_forward_pre_hooks,
)
from placer.executor.loss import CombinationFinder, Normalizer, Reduction, StepLoss
from placer.executor.parameter_copies import ParameterCopies
from placer.executor.pickled import (
    ExampleCall,
    as_captured,
    check_changed,
    emit_again,
    emit_changed,
    example_call,
    model_signature,
)
from placer.executor.place import CALLER, Place, is_on
from placer.executor.programs import Call, Programs, ProgramsByCall
from placer.executor.replica import Replica
from placer.executor.sampler import ReplicaSampler
from placer.executor.scaling import scale_of
from placer.executor.scatter import (
    ScatteredBatch,
    batch_size,
    check_results,
    join_results,
    scatter_batch,
    split_target,
    unwrap_target,
)
from placer.executor.signature import MethodWithSignature
from placer.executor.slice_store import stored_for_slice
from placer.executor.state import CallState
from placer.executor.statistics import DeferredStatistics, defers_statistics, update_statistics
from placer.executor.transfer import transfer
from placer.executor.tree import write_back
from placer.plan.types import Plan
from placer.program import CallFormat, Target, rebuild_call, set_flags, store, unflatten_output
from placer.schedule import one_process_order

_SHARED_TABLES = tuple(name for name in vars(nn.Module()) if name != "training")


class PlacedModule(nn.Module):
    """A model split over devices and replicated, with the names and the results of the original.

    It has the parameters and buffers of ``model`` (already on the places of the first replica) under
    their own names, so ``state_dict()`` has the original's keys. Other replicas read copies of them.
    Gradients of all replicas are summed into the one ``.grad``; buffers of the other replicas are
    dropped after each call, as ``nn.DataParallel`` does.

    A batch is split along dim 0 into replicas and then micro-batches, of the sizes that
    ``torch.chunk`` gives. A layer that depends on the whole batch (BatchNorm in train mode) sees one
    slice at a time; with ``batch_norm: "deferred"`` its running statistics are still updated once per
    batch, from all rows. Hooks run on this module (it has the original's) and on all modules in it.
    A call that differs from the captured one (an optional argument, a cache) is captured when it
    first occurs, and runs on the same stages. Plain attributes are read from ``model`` and set on it,
    and later calls see the new values. Pickling saves the model and the plan; loading captures the
    model and emits its stages again.
    """

    # Attributes of this module itself, whatever names the model's layers have.
    _FIELDS = frozenset(
        {
            *("plan", "training", "_tree", "_staged", "_replicas", "_programs", "_calls"),
            *("_statistics", "_combination", "_signature"),
        }
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        staged: StagedModel,
        places: Sequence[Sequence[Place]],
    ) -> None:
        super().__init__()
        # Shared, not copied: a tensor or layer that is loaded, moved or swapped here is the one that runs.
        for table in _SHARED_TABLES:
            self.__dict__[table] = model.__dict__[table]
        self._tree = model  # not registered as a submodule, because this module shares its tables
        self.training = model.training
        self.plan = plan
        self._staged = staged
        self._statistics = DeferredStatistics() if defers_statistics(plan) else None
        self._replicas = tuple(
            Replica(staged, row, places[0], plan.precision, self._statistics) for row in places
        )
        self._programs = Programs(model, plan, staged)
        self._calls = ProgramsByCall(self._programs)
        self._combination = CombinationFinder()
        self._signature = model_signature(model)  # of the model that was planned

    def __reduce__(self) -> tuple[Any, ...]:
        made = {*_SHARED_TABLES, *self._FIELDS} - {"training"}
        others = {name: value for name, value in self.__dict__.items() if name not in made}
        places = [replica.places for replica in self._replicas]
        call, state_stage = example_call(self._staged), dict(self._staged.state_stage)
        if model_signature(self._tree) != self._signature:
            args, kwargs = rebuild_call(self._programs.call, self._programs.latest)
            call = replace(call, args=args, kwargs=kwargs)
            check_changed(self._tree, self.plan, call, state_stage)
        saved = self._tree, self.plan, call, places, self._signature, state_stage
        return _restore, (type(self), *saved), others

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedModule:
        # Does not use __reduce__: code and plan never change, so copies share them.
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @property
    def staged(self) -> StagedModel:
        """The stages' code for the captured call, how it is called, and what it returns."""
        return self._staged

    @property
    def output_device(self) -> torch.device:
        """The device of results: that of the first replica's last stage."""
        return self._replicas[0].output_place.device

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            tree = self.__dict__.get("_tree")
            if not hasattr(tree, name):
                raise
            value = getattr(tree, name)
            if getattr(value, "__self__", None) is not tree:
                return value
            hint = "it is a method of the original model, which was not placed: call it there"
            raise AttributeError(f"{error}; {hint}", name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._FIELDS:
            self.__dict__[name] = value
        elif name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._tree, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or not hasattr(self._tree, name):
            super().__delattr__(name)
        else:
            delattr(self._tree, name)

    def __getitem__(self, index: Any) -> Any:
        """``model[index]`` of the original, such as a layer of an ``nn.Sequential``."""
        model: Any = self._tree
        return model[index]

    def __setitem__(self, index: Any, module: Any) -> None:
        model: Any = self._tree
        model[index] = module

    def get_submodule(self, target: str) -> nn.Module:
        """The original's module at the path ``target``; at ``""``, this one."""
        return self._tree.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter that the original has under this name."""
        return self._tree.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """The buffer that the original has under this name."""
        return self._tree.get_buffer(target)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises ``PlacerError``: a placed module cannot be compiled as a whole."""
        raise compile_error()

    # Saving and loading call the original, whose class may override them and whose hooks then run.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What the original's ``state_dict`` returns."""
        return self._tree.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Calls the original's ``load_state_dict``."""
        return self._tree.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, *args: Any) -> None:
        # Called by ``load_state_dict`` of a module that contains this one.
        self._tree._load_from_state_dict(*args)

    def train(self, mode: bool = True) -> PlacedModule:
        """Set the mode of all modules; the next call runs the model's program for that mode."""
        super().train(mode)
        self._tree.train(mode)
        return self

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original's ``forward`` returns for these arguments, on ``output_device``.

        Inputs may be on any device. Results of the slices are concatenated along dim 0; a result that
        does not depend on the batch is returned as it is. Backward runs through all stages. Raises
        ``CaptureError`` when the call differs from the captured one and cannot be captured.
        """
        refuse_compile()
        return self._run(self._calls.find(args, kwargs))

    _forward.__name__ = "forward"
    forward = MethodWithSignature(_forward, lambda module: module._programs.call.signature)

    def run_leaves(self, leaves: list[torch.Tensor]) -> Any:
        """`forward` for the flattened tensor inputs of the captured call."""
        return self._run(Call(self._programs, leaves, None))

    def _run(self, call: Call) -> Any:
        programs, leaves = call.programs, call.leaves
        home = self._replicas[0].output_place
        self._set_flags(call)
        batch = self._scatter(programs.call, leaves)
        if len(batch.slices) > 1:
            check_results(programs.captured)
        results = []
        with self._deferred_statistics():
            state = CallState(self._tree, call.leaves_by_name, batch.sizes)
            for index, runs in enumerate(self._runs(programs, batch, state)):
                for run in runs:
                    result = run_forward(run)
                    results.append(transfer(result, run.replica.output_place, home))
                if index == 0:
                    self._write_back(runs)
        staged = run.replica.staged
        joined = join_results(staged, results, batch.sizes)
        self._store(staged, joined, call)
        return unflatten_output(staged.call, joined)

    def _store(self, staged: StagedModel, leaves: Sequence[Any], call: Call) -> None:
        """Leave behind what forward would have left; ``leaves`` are those of the whole batch's result."""
        if staged.stored:
            store(staged.stored, staged.stored_leaves(leaves), self._stored_in(call))

    def _set_flags(self, call: Call) -> None:
        """Let inputs and parameters require gradients as forward would have set it."""
        stored = call.programs.captured.stored
        if stored:
            set_flags(stored, self._stored_in(call))

    def _stored_in(self, call: Call) -> Target:
        return Target(model=self._tree, arguments=call.arguments, inputs=call.leaves)

    def _runs(
        self,
        programs: Programs,
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
        programs_of = programs.find_all(batch.slices)
        runs: list[list[PlacedMicrobatch]] = []
        for index in range(len(batch.rows)):
            runs.append([])
            copies = ParameterCopies()
            trees: dict[int, tuple[Replica, list[Any]]] = {}
            for position in batch.of_replica(index):
                staged, inputs = programs_of[position], batch.slices[position]
                if id(staged) not in trees:
                    variant = self._replicas[index].with_program(staged)
                    trees[id(staged)] = variant, variant.trees(self._tree, copies)
                variant, found = trees[id(staged)]
                runs[-1].append(
                    PlacedMicrobatch(
                        replica=variant,
                        trees=found,
                        leaves=inputs,
                        inputs=state.inputs(staged, inputs, position),
                        target=targets[position] if targets else None,
                        counted=counts[position] if counts else None,
                    )
                )
        return runs

    def _write_back(self, runs: list[PlacedMicrobatch]) -> None:
        """Store in the model what modules of the first replica's ``runs`` wrote to buffers and attributes."""
        for run in runs:
            for tree in run.trees:
                write_back(tree)

    @contextmanager
    def _deferred_statistics(self) -> Iterator[None]:
        """At the end of the block, update running statistics once, from all slices that it has run."""
        statistics = self._statistics
        if statistics is None:
            yield
            return
        statistics.clear()
        yield
        statistics.set_counters(self._tree)
        update_statistics(self._tree, statistics.take_moments())

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., torch.Tensor],
        reduction: Reduction = "auto",
        normalizer: Normalizer | None = None,
        own_rows: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward and backward of one batch under the plan's schedule; gradients are accumulated.

        ``loss_fn(output, target)``, or ``loss_fn(output)`` without a target, returns a scalar. It is
        called once per slice of the batch, outside the autocast of the plan's ``precision``; to compute
        what torch would inside, use ``F.cross_entropy(output.float(), target)`` or call `step` under
        ``torch.autocast``. Gradients are those of ``loss_fn`` on the whole batch, also if slices have
        different numbers of rows. If there is more than one slice, it must be known how ``loss_fn``
        combines rows:

        * ``reduction="mean"``: it is a mean over rows.
        * ``reduction="sum"``: it is a sum over rows.
        * ``normalizer``: it is a mean over as many items as ``normalizer(target)`` counts, for example
          ``lambda target: (target != -100).sum()``. A slice with a count of 0 does not contribute.
        * ``reduction="auto"``: known for ``cross_entropy`` and ``nll_loss`` with ``ignore_index`` and
          ``weight``, and for losses of elements such as ``mse_loss`` (the functions,
          ``functools.partial`` of them, and their modules). Any other function is tried with three more
          calls on a few rows: at first, and again when a target has new values. A loss that is neither a
          mean nor a sum over rows raises an error that says what to pass, and so does a target with more
          than 256 labels. The trial cannot detect a loss that changes from step to step. Random states
          and objects, lists and dicts that the function holds are restored after it; effects elsewhere
          (a global variable, a file) are not.

        A ``reduction`` or ``normalizer`` that you pass is tried as well, once per function and shapes;
        there is a warning if it does not hold.

        Tensors in ``target`` are split along dim 0 like the inputs; every slice gets the whole of a
        ``placer.Whole(value)``. With ``own_rows`` the inputs and the target are only this process's
        rows, in a job of several processes (`placer.executor.distributed`). ``scaler`` scales the loss,
        as for fp16. Returns the unscaled loss of the whole batch, a detached scalar on
        ``output_device``. Raises ``PlacerError`` before computing any gradient if a tensor of ``target``
        does not have the batch's number of rows, or if it is not known how ``loss_fn`` combines rows.
        """
        refuse_compile()
        loss_of = StepLoss(
            loss_fn, reduction=reduction, normalizer=normalizer, found=self._combination
        )
        refuse_backward_hooks(self)
        args, kwargs = run_forward_pre_hooks(self, args, kwargs)
        loss = self._step(
            self._calls.find(args, kwargs, step=True),
            target=target,
            loss_of=loss_of,
            own_rows=own_rows,
            scaler=scaler,
        )
        loss_of.require_graph()
        return loss

    def step_leaves(
        self,
        leaves: list[torch.Tensor],
        *,
        loss_fn: Callable[..., torch.Tensor],
        target: Any = None,
    ) -> torch.Tensor:
        """`step` for the flattened inputs of the captured call, for a mean over rows."""
        call = Call(self._programs, leaves, None)
        return self._step(call, loss_of=StepLoss(loss_fn, reduction="mean"), target=target)

    def _step(
        self,
        call: Call,
        *,
        loss_of: StepLoss,
        target: Any = None,
        own_rows: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        # ``own_rows`` makes no difference here: a single process always has all rows.
        programs, leaves = call.programs, call.leaves
        self._set_flags(call)
        callers = CallerGraph()
        target = callers.cut(target)
        batch = self._scatter(programs.call, callers.cut(leaves))
        targets = split_target(target, batch.total, batch.sizes)
        counts = self._count(loss_of, target, targets, batch.total)
        scale = 1.0 if scaler is None else scale_of(scaler, self.output_device)
        losses: list[torch.Tensor] = []
        kept: list[Sequence[Any]] = []
        in_parts = len(batch.slices) > 1 or len(self.plan.stages) > 1
        hooked = self._tree.parameters() if in_parts else ()
        with self._deferred_statistics(), hooks_run_once(hooked):
            state = CallState(self._tree, call.leaves_by_name, batch.sizes, callers.cut)
            for index, runs in enumerate(self._runs(programs, batch, state, targets, counts)):
                losses += self._replica_step(runs, loss_of, scale, kept)
                if index == 0:
                    self._write_back(runs)
                staged = runs[-1].replica.staged
        callers.backward()
        home = self._replicas[0].output_place
        if staged.stored:
            self._store(staged, join_results(staged, kept, batch.sizes), call)
        return torch.stack([loss.to(home.device) for loss in losses]).sum()

    @property
    def own_share(self) -> tuple[int, int]:
        """``(index, number of shares)``: which share of a batch's rows this process loads."""
        return 0, 1

    def sampler(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> ReplicaSampler:
        """A ``batch_sampler`` for a ``DataLoader`` whose batches go into ``step(…, own_rows=True)``.

        ``batch_size`` counts the rows of all replicas, so training does not depend on their number.
        Call ``set_epoch(epoch)`` on it before each epoch. Raises ``PlacerError`` when a batch has
        fewer rows than there are replicas.
        """
        index, shares = self.own_share
        return ReplicaSampler(
            dataset,
            batch_size,
            num_replicas=shares,
            replica_index=index,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns their norm before that."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A ``GradScaler`` for `step`; with several processes, all ranks skip the same steps."""
        return torch.amp.GradScaler(self.output_device.type, **options)

    def _replica_step(
        self,
        runs: list[PlacedMicrobatch],
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
            home = self._replicas[0].output_place
            leaves = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            kept.append(transfer(leaves, given.replica.output_place, home))
            with stored_for_slice(staged, result, self._tree):
                return self._loss_of_slice(loss_of, given, output)

        actions = one_process_order(self.plan.schedule, len(self._staged.stages), len(runs))
        try:
            return run_schedule(dict(enumerate(runs)), actions, loss_of_slice, scale=scale)
        except RuntimeError as error:
            several = len(runs) > 1 or len(self._replicas) > 1
            if several and "through the graph a second time" in str(error):
                raise shared_graph() from error
            raise

    def _loss_of_slice(
        self, loss_of: StepLoss, given: PlacedMicrobatch, output: Any
    ) -> torch.Tensor:
        """The weighted loss of one micro-batch, whose last stage returned ``output``."""
        call, place = given.replica.staged.call, given.replica.output_place
        if self._forward_hooks:
            output = run_forward_hooks(self, *rebuild_call(call, given.leaves), output)
        target = given.target
        if not is_on(place.device, target):
            target = transfer(target, CALLER, place)
        rows = batch_size(call, given.leaves)
        return self._call_loss(loss_of, output, target, rows=rows, counted=given.counted)

    def _call_loss(self, loss_of: StepLoss, output: Any, target: Any, **given: Any) -> torch.Tensor:
        # A method of its own, because a rank of a job also checks what the loss depends on.
        return loss_of.of_slice(output, target, **given)

    def _count(
        self, loss_of: StepLoss, target: Any, targets: list[Any], total: int | None
    ) -> list[float | None]:
        """Begin the loss of a batch; returns what its normalizer counts in the target of each slice."""
        if len(targets) == 1:
            return [None]
        whole, *counts = loss_of.count([unwrap_target(target), *targets])
        loss_of.begin(target, rows=total, total=total, counted=whole)
        if whole is not None:
            loss_of.require_count(sum(count or 0.0 for count in counts))
        return counts

    def _scatter(self, call: CallFormat, leaves: list[torch.Tensor]) -> ScatteredBatch:
        return scatter_batch(
            call, leaves, replicas=len(self._replicas), microbatches=self.plan.microbatches
        )

    def extra_repr(self) -> str:
        """The devices of each stage, and the numbers of replicas and micro-batches."""
        stages = ", ".join("/".join(stage.devices) for stage in self.plan.stages)
        return f"stages=({stages}), replicas={self.plan.replicas}, microbatches={self.plan.microbatches}"


def _restore(
    kind: type[PlacedModule],
    model: nn.Module,
    plan: Plan,
    call: ExampleCall,
    places: Sequence[Sequence[Place]],
    signature: tuple[tuple[str, ...], ...],
    state_stage: Mapping[str, int],
) -> PlacedModule:
    if model_signature(model) != signature:
        staged = emit_changed(model, plan, call, state_stage)
        restored = kind(model, plan=plan, staged=staged, places=places)
        restored._signature = signature
        return restored
    with as_captured(model, call):
        return kind(model, plan=plan, staged=emit_again(model, plan, call), places=places)


def devices_of(module: PlacedModule) -> tuple[torch.device, ...]:
    """The devices on which the stages of its replicas run."""
    return tuple(dict.fromkeys(p.device for replica in module._replicas for p in replica.places))


def original_of(module: PlacedModule) -> nn.Module:
    """The copy of the user's model in which ``module`` keeps its attributes."""
    return module._tree
