"""`PlacedModule`, the ``nn.Module`` that users get: of the model's own class, and run by a `Runtime`."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from placer.errors import CaptureError, PlacerError
from placer.executor.boxes import refuse_boxes
from placer.executor.hooks import (
    apply_in_place,
    compile_error,
    refuse_backward_hooks,
    refuse_compile,
    run_forward_pre_hooks,
)
from placer.executor.loss import Normalizer, Reduction, StepLoss
from placer.executor.pickled import (
    ExampleCall,
    as_captured,
    check_unchanged,
    emit_again,
    example_call,
)
from placer.executor.places.place import Place
from placer.executor.runtime import Runtime
from placer.executor.sampler import ReplicaSampler
from placer.executor.watch import StepReport
from placer.plan.types import Plan
from placer.program import VariableGuard
from placer.program.objects.originals import note_originals

_RUNTIME, _FORWARD = "_PlacedModule__runtime", "_PlacedModule__forward"  # slots


class PlacedModule(nn.Module):
    """A model split over devices and replicated, with the class, the names and the results of the original.

    It is an instance of a subclass of the model's class, so it has the model's methods and properties, and
    it shares all attributes with the model whose weights are on the devices: parameters, buffers and layers
    under their own names, hooks, plain attributes. A batch is split along its dimension into replicas and
    then micro-batches, of the sizes that ``torch.chunk`` gives. A layer that depends on the whole batch
    (BatchNorm in train mode) sees one slice at a time; with ``batch_norm: "deferred"`` its running statistics
    are still updated once per batch, from all rows. Hooks run on this module and on all modules in it. A call
    that differs from the captured one (an optional argument, a cache, another method) is captured when it
    first occurs, and runs on the same stages. Pickling saves the model and the plan; loading captures the
    model and emits its stages again.
    """

    # In slots, because the attributes in ``__dict__`` are the model's.
    __slots__ = ("__forward", "__runtime")

    @property
    def plan(self) -> Plan:
        """The plan that the module follows."""
        return runtime_of(self).plan

    @property
    def output_device(self) -> torch.device:
        """The device of results: that of the first replica's last stage; under torchrun, the rank's own."""
        return runtime_of(self).output_device

    @property
    def own_share(self) -> tuple[int, int]:
        """``(index, number of shares)``: which share of a batch's rows this process loads."""
        return runtime_of(self).own_share

    @property
    def boxes(self) -> dict[str, tuple[slice, ...]]:
        """By the name of an input, a slice per dimension: which part of it this process needs.

        For inputs of the sizes with which the module was placed. Under torchrun, with stages that are split
        in space, ``placer.Box(x[placed.boxes["x"]], x.shape)`` may be passed instead of ``x``; in one process
        and for inputs that are not cut, it is all of them.
        """
        return runtime_of(self).boxes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the original's ``forward`` returns for these arguments, on ``output_device``.

        Inputs may be on any device. Results of the slices are joined along the dimension that has a row per
        sample; a result that does not depend on the batch is returned as it is. Backward runs through all
        stages. Raises ``CaptureError`` when the call differs from the captured one and cannot be captured.
        """
        refuse_compile()
        return runtime_of(self).call(args, kwargs)

    # A layer may have the name of a method of ours, such as ``step``.
    def get_submodule(self, target: str) -> nn.Module:
        """The original's module at the path ``target``; at ``""``, this one."""
        return runtime_of(self).tree.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter that the original has under this name."""
        return runtime_of(self).tree.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """The buffer that the original has under this name."""
        return runtime_of(self).tree.get_buffer(target)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raises ``PlacerError``: a placed module cannot be compiled as a whole."""
        raise compile_error()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return apply_in_place(super()._apply, fn, recurse)

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., torch.Tensor],
        reduction: Reduction = "auto",
        normalizer: Normalizer | None = None,
        own_rows: bool = False,
        whole_batch: bool = False,
        profile: bool = False,
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

        A ``reduction`` or ``normalizer`` that you pass is not tried: if it is wrong, so are the loss and the
        gradients of a batch that is split.

        ``whole_batch=True`` is for a loss that compares rows with each other (contrastive, CLIP, Dice over
        the batch): the results of all slices are joined as ``placed(x)`` joins them, ``loss_fn`` is called
        once, and its gradients go back through the slices. All micro-batches are then in memory, so the
        schedule must be GPipe; plans count that if the spec's ``"loss"`` has ``"whole_batch": true``.

        Tensors in ``target`` are split along dim 0, and a ``placer.Batched(tensor, dim)`` along ``dim``;
        every slice gets the whole of a ``placer.Whole(value)``. The same marks can be put around inputs.
        With ``own_rows`` the inputs and the target are only this process's rows, in a job of several
        processes (`placer.executor.distributed`). ``scaler`` scales the loss,
        as for fp16. With ``profile`` the step is measured, for `report`, on all ranks or on none. Returns the
        unscaled loss of the whole batch, a detached scalar on ``output_device``. Raises ``PlacerError``
        before computing any gradient if a tensor of ``target`` does not have the batch's number of rows, or
        if it is not known how ``loss_fn`` combines rows.
        """
        refuse_compile()
        if profile not in (True, False):
            problem = f"is {profile!r}, where True or False was expected"
            trace = "placer.report.write_trace(placed.plan, 'step.json', measured=placed.report())"
            raise PlacerError("profile", problem, f"pass True; a trace is written by {trace}")
        refuse_boxes(target, why="is part of a target, but loss_fn is called with the whole result")
        runtime = runtime_of(self)
        own_call = type(runtime.tree).__call__ is not nn.Module.__call__
        if own_call or getattr(self, _FORWARD) is not None:
            raise PlacerError(
                type(runtime.tree).__name__,
                f"has a {'__call__' if own_call else 'forward'} of its own, which step would not run",
                "do in the model's forward what it does, or call placed(x) and run the backward yourself",
            )
        loss_of = StepLoss(
            loss_fn,
            reduction=reduction,
            normalizer=normalizer,
            found=runtime.combination,
            whole_batch=whole_batch,
        )
        refuse_backward_hooks(self)
        args, kwargs = run_forward_pre_hooks(self, args, kwargs)
        step = functools.partial(
            runtime.step,
            runtime.calls.find(args, kwargs, step=True),
            target=target,
            loss_of=loss_of,
            own_rows=own_rows,
            scaler=scaler,
        )
        loss = runtime.watched(step) if profile else step()
        loss_of.require_graph()
        return loss

    def accumulate(self) -> AbstractContextManager[None]:
        """In this block, gradients of `step` are not summed over replicas, as in DDP's ``no_sync``.

        The first step after the block sums all of them, so it must come before the optimizer's step and
        before clipping, which raise ``PlacerError`` otherwise. Hooks on gradients run in every step, in the
        block with the gradients of this rank. In one process nothing changes.
        """
        return runtime_of(self).accumulating()

    def report(self) -> StepReport:
        """What the last ``step(…, profile=True)`` took of each stage and rank, beside the plan's prediction.

        ``print`` it, or give it to ``placer.report.write_trace(plan, path, measured=…)``. Raises
        ``PlacerError`` if no step was measured.
        """
        found = runtime_of(self).report
        if found is None:
            raise PlacerError("report", "no step was measured", "call step(…, profile=True) first")
        return found

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
        index, shares = runtime_of(self).own_share
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
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

        Returns the norm before scaling; a tied parameter counts once. In a job all ranks call it, with the
        same arguments, and get the same norm; else raises ``PlacerError``, or ``PeerError`` if one is lost.
        """
        return runtime_of(self).clip_grad_norm_(max_norm, norm_type)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A ``GradScaler`` for `step`; in a job all ranks skip the same steps."""
        return runtime_of(self).grad_scaler(**options)

    def extra_repr(self) -> str:
        """The model's own, the devices of each stage, and the numbers of replicas and micro-batches."""
        plan = self.plan
        stages = ", ".join("/".join(stage.devices) for stage in plan.stages)
        parts = (
            f"stages=({stages})",
            f"replicas={plan.replicas}",
            f"microbatches={plan.microbatches}",
        )
        return ", ".join(filter(None, (super().extra_repr(), *parts)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        runtime = runtime_of(self)
        places = [replica.shards for replica in runtime.replicas]
        check_unchanged(runtime.tree, runtime.signature)
        own = getattr(self, _FORWARD)
        return _restore, (runtime.tree, runtime.plan, example_call(runtime.staged), places, own)

    def __copy__(self) -> Any:
        restore, (tree, *rest) = self.__reduce__()
        return restore(copy.copy(tree), *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedModule:
        # Does not use __reduce__: code and plan never change, so copies share them.
        twin = _new(type(self))
        memo[id(self)] = twin
        # Tensors in variables of the model's code are not the model's own.
        guards = runtime_of(self).calls.guards
        memo |= {id(each.value): each.value for each in guards if isinstance(each, VariableGuard)}
        runtime = copy.deepcopy(runtime_of(self), memo)
        note_originals(runtime_of(self).tree, runtime.tree)
        _connect(twin, runtime)
        object.__setattr__(twin, _FORWARD, copy.deepcopy(getattr(self, _FORWARD), memo))
        return twin


M = TypeVar("M", bound=PlacedModule)


def runtime_of(module: nn.Module) -> Runtime:
    """The `Runtime` of a placed module; that of a rank's part is a ``DistributedRuntime``."""
    runtime: Runtime = getattr(module, _RUNTIME)
    return runtime


def make_placed(kind: type[M], runtime: Runtime) -> M:
    """The placed module, of a subclass of ``kind`` and the model's class, that ``runtime`` runs."""
    module = _new(_placed_class(kind, type(runtime.tree)))
    _connect(module, runtime)
    return module


def check_names(model: nn.Module, kind: type[PlacedModule] = PlacedModule) -> None:
    """Raise ``CaptureError`` if ``model`` has an attribute with the name of one that placed modules have.

    Layers, parameters and buffers may have such a name.
    """
    names = {name for each in kind.__mro__ for name in vars(each) if issubclass(each, PlacedModule)}
    for name in sorted(names - vars(nn.Module).keys() - {"device"}):
        if not name.startswith("_") and (name in vars(model) or hasattr(type(model), name)):
            raise CaptureError(
                f"{type(model).__name__}.{name}",
                f"placed modules have an attribute {name!r} of their own",
                "give the model's another name, or place a module that contains the model",
            )


def _new(kind: type[M]) -> M:
    module = object.__new__(kind)
    object.__setattr__(module, _FORWARD, None)
    return module


def _connect(module: PlacedModule, runtime: Runtime) -> None:
    object.__setattr__(module, "__dict__", vars(runtime.tree))
    object.__setattr__(module, _RUNTIME, runtime)
    runtime.module = module


def _placed_class(kind: type[M], of: type[nn.Module]) -> type[M]:
    """The class of placed modules of class ``of``: a subclass of ``kind`` and ``of``, and named like ``of``.

    It is made once. Called, it makes a model that is not placed, because code of models makes others with
    ``type(self)(...)``.
    """
    for known in of.__subclasses__():
        if known.__bases__ == (kind, of):
            return cast("type[M]", known)
    own = {name for each in kind.__mro__ for name in vars(each)}
    functions = {
        name: value
        for each in reversed(of.__mro__[: of.__mro__.index(nn.Module)])
        for name, value in vars(each).items()
        if isinstance(value, types.FunctionType) and not inspect.isgeneratorfunction(value)
    }
    methods = {
        name: _method(name, function)
        for name, function in functions.items()
        if name not in own and not name.startswith("__")
    }

    def make_model(cls: type[Any], *args: Any, **kwargs: Any) -> nn.Module:
        return of(*args, **kwargs)

    namespace = {
        "__slots__": (),
        "__module__": of.__module__,
        "__qualname__": of.__qualname__,
        "__doc__": of.__doc__,
        "__new__": make_model,
        "forward": _Forward(kind, of),
        **methods,
    }
    if hasattr(of, "device"):  # as models of transformers have: the device of their parameters
        namespace["device"] = inspect.getattr_static(of, "device")
    return types.new_class(of.__name__, (kind, of), {}, lambda body: body.update(namespace))


class _Forward:
    """The descriptor of ``forward``, with the signature of the model's own, which Trainers read.

    An assignment, such as accelerate makes, overrides it for the placed module and not for the model.
    """

    def __init__(self, kind: type[PlacedModule], of: type[nn.Module]) -> None:
        @functools.wraps(of.forward)
        def forward(self: PlacedModule, /, *args: Any, **kwargs: Any) -> Any:
            return kind.forward(self, *args, **kwargs)

        self._function: Any = forward  # mypy takes it for no descriptor

    def __get__(self, module: Any, owner: type[Any] | None = None) -> Any:
        if module is None:
            return self._function
        own = getattr(module, _FORWARD)
        if own is not None:
            return own
        refuse_compile()  # here, because Dynamo of torch 2.11 cannot trace the next line
        return self._function.__get__(module)

    def __set__(self, module: Any, value: Any) -> None:
        object.__setattr__(module, _FORWARD, value)

    def __delete__(self, module: Any) -> None:
        object.__setattr__(module, _FORWARD, None)


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the model's class, for a placed module: `Runtime.call_method` decides how it runs."""

    @functools.wraps(function)
    def method(self: PlacedModule, /, *args: Any, **kwargs: Any) -> Any:
        return runtime_of(self).call_method(name, function, args, kwargs)

    return method


def _restore(
    model: nn.Module,
    plan: Plan,
    call: ExampleCall,
    places: Sequence[Sequence[Sequence[Place]]],
    forward: Any,
) -> PlacedModule:
    with as_captured(model, call):
        staged = emit_again(model, plan, call)
        placed = make_placed(PlacedModule, Runtime(model, plan=plan, staged=staged, places=places))
    object.__setattr__(placed, _FORWARD, forward)
    return placed


def devices_of(module: PlacedModule) -> tuple[torch.device, ...]:
    """The devices on which the stages of its replicas run."""
    replicas = runtime_of(module).replicas
    return tuple(
        dict.fromkeys(p.device for replica in replicas for row in replica.shards for p in row)
    )
