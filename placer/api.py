"""The functions that users call: parts of the way from a spec to a program, a plan and a placed module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from placer.cost import Loss, batch_rows, loss_of
from placer.errors import CaptureError, PlacerError, SpecError, nearest
from placer.executor.calls.program_cache import split_rules
from placer.executor.distributed.job.assignment import Job, find_job
from placer.executor.loss.call import require_function
from placer.executor.module import PlacedModule, check_names
from placer.executor.place_model import place_model
from placer.executor.places.cuda_allocator import prepare_allocator
from placer.executor.places.device_map import map_devices
from placer.executor.unplaced import warn_of_unplaced_optimizers
from placer.plan.check import check_pinned, check_plan, one_copy, require_fit
from placer.plan.types import Plan
from placer.planner.batch import inputs_of_step
from placer.planner.devices import kind_problems, machine_memory
from placer.precision import planned_autocast, recorded_under
from placer.program import Program, flatten_call, is_mark, lower, rewritten, unmarked
from placer.search.auto import Answer, choose_spec, plan_of, with_known_devices
from placer.search.largest import Case, Largest, find_largest
from placer.search.remedies import misfit_error
from placer.simulation import SimulationReport, simulate_plan
from placer.simulation.judge import JudgingPlanner
from placer.spec import DeviceSpec, PlacementSpec, layer_problems, load_spec
from placer.spec.load import errors_located
from placer.spec.options import SpecFields
from placer.spec.rewrite import Rewrite

Example = Sequence[Any] | Mapping[str, Any] | Tensor  # a mapping is one argument
SpecSource = PlacementSpec | Mapping[str, Any] | str | Path


def make_plan(
    model: nn.Module,
    spec: SpecSource,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    whole_batch: bool = False,
    processes: bool = False,
    ignore_device_moves: bool = False,
    rewrites: Sequence[Rewrite] = (),
) -> Plan:
    """The plan for ``model`` under ``spec`` for inputs like ``args`` and ``kwargs``.

    Nothing is allocated: model and inputs may live on ``meta``. With ``processes`` the plan is for
    one process per device (``torchrun``), and its peaks come from a dry run of every rank; inside a job,
    `compile` does this by itself. A plan that overflows a budget has ``fits`` False. For CUDA devices a dry
    run through a model of torch's allocator decides this, for others only if an estimate is near its budget.

    The plan counts the memory of ``loss_fn(output, target)``, or of ``loss_fn(output)`` without a target, on
    the last stage's device; by default that of the spec's ``"loss"``, or of one that is assumed, as the
    plan's ``loss`` says. ``target`` is that of the whole batch, on any device. A plan keeps the name of a
    function that can be imported; where it is judged again without one (in a job of several processes), the
    default is counted. With ``whole_batch`` the loss is computed once, over all micro-batches and replicas,
    as with ``placed.step(…, whole_batch=True)``.

    ``ignore_device_moves`` is for a model that was split by hand: the devices to which its forward moves
    tensors (``x.to("cuda:1")``) are ignored, because the plan says where everything runs. ``rewrites`` are
    changes of the captured graph by registered passes (`placer.program.lower`), which the plan keeps. Raises
    ``SpecError``, ``CaptureError``, and ``VersionError`` if the installed torch cannot do this.
    """
    with errors_located(spec):
        wanted = as_spec(spec, model)
        program, leaves = lower_call(
            model, args, kwargs, wanted, ignore_device_moves=ignore_device_moves, rewrites=rewrites
        )
        loss = _given_loss(loss_fn, target, whole_batch=whole_batch)
        make = JudgingPlanner(program, leaves, processes=processes, loss=loss)
        return plan_of(wanted, make)


def compile(
    model: nn.Module,
    spec_or_plan: SpecSource | Plan,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: str | Path | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
    run_on: str | None = None,
    ignore_device_moves: bool = False,
) -> PlacedModule:
    """Place ``model`` as the spec or plan says; the result is a plain ``nn.Module`` to train or run.

    The caller's model does not change: parameters are copied to their devices, one at a time.
    Parameters on ``meta`` are read from ``weights`` (a safetensors or torch file) or made by their
    modules' initialisers. ``run_on`` runs every stage on that one device (``"cpu"`` to try a spec
    without its GPUs). ``ignore_device_moves`` is as for `make_plan`. In a job of several processes
    (``torchrun``) the result is this rank's part of the model, and every rank makes the call: see
    `placer.executor.distributed`.

    Raises ``SpecError``, ``CaptureError``, ``DeviceError``, ``PlanError`` if a plan belongs to another
    model, ``BudgetError`` if the placement does not fit, and, before anything else is done,
    ``VersionError`` if the installed torch cannot run it.
    """
    job = find_job()
    file = Path(weights) if weights is not None else None

    def plan_here() -> tuple[Program, Plan]:
        with errors_located(spec_or_plan):
            wanted = (
                spec_or_plan if isinstance(spec_or_plan, Plan) else as_spec(spec_or_plan, model)
            )
            _refuse_placed(model)
            if isinstance(model, nn.Module):
                check_names(model)
            program, leaves = lower_call(
                model, args, kwargs, wanted, ignore_device_moves=ignore_device_moves
            )
            program, plan = _plan_or_refuse(wanted, program, leaves, job)
            if job is None:
                _check_one_process(plan)
            return program, plan

    if job is not None:
        # torch.distributed takes a while to import.
        from placer.executor.distributed.launch import launch

        part = launch(model, plan_here, job, weights=file, initialize=initialize, run_on=run_on)
        warn_of_unplaced_optimizers(model, part)
        return part
    program, plan = plan_here()
    places = map_devices(plan, run_on)
    used = [place for replica in places for shards in replica for place in shards]
    if any(place.device.type == "cuda" for place in used):
        check_pinned(plan, machine_memory())
    prepare_allocator(plan, used)
    placed = place_model(model, program, plan, places, weights=file, initialize=initialize)
    warn_of_unplaced_optimizers(model, placed)
    return placed


def _plan_or_refuse(
    wanted: PlacementSpec | Plan, program: Program, inputs: Sequence[Tensor], job: Job | None
) -> tuple[Program, Plan]:
    """The plan to run, and its program.

    Raises ``PlanError`` if the plan is of another model, and ``BudgetError`` if it does not fit.
    In a job of several processes every rank must fit. Each rank checks all of them by itself, with the
    same result, because the ranks have not exchanged anything yet.
    """
    in_job = job is not None
    make = JudgingPlanner(program, inputs, processes=in_job, verdict_only=True)
    if isinstance(wanted, Plan):
        check_plan(wanted, program)
        judged_again = in_job and not wanted.processes
        plan = make.judge(wanted) if judged_again else wanted
        require_fit(plan, among_ranks=judged_again)
        return program, plan
    plan = plan_of(wanted, make)
    if not plan.fits:
        raise misfit_error(wanted, plan, make)
    return make.program_of(plan), plan


class SearchOptions(SpecFields, total=False):
    """The keyword arguments of `auto_spec` and `auto_plan`."""

    devices: Iterable[Any] | str | None
    loss_fn: Callable[..., Tensor] | None
    target: Any
    whole_batch: bool
    processes: bool
    ignore_device_moves: bool


def auto_spec(
    model: nn.Module,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[SearchOptions],
) -> PlacementSpec:
    """The spec of `auto_plan`, of the same arguments: the fastest way to train ``model`` that fits."""
    return _auto(model, args, kwargs, **options).spec


def auto_plan(
    model: nn.Module,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[SearchOptions],
) -> Plan:
    """The plan with the least seconds per step that fits on ``devices``, and why others lost.

    Replicas, stages, shards in space, micro-batches, schedule and recomputation are chosen together.
    ``plan.strategy`` names them, and ``plan.alternatives`` has the best of each other kind of strategy.

    ``devices`` are device names, ``{"name", "memory", "kind"}`` objects or ``DeviceSpec`` values, or a single
    one of them, all of which may be used; ``machine="dgx-a100:2"`` stands for all devices of a machine.
    ``loss_fn`` (which the spec names, if it can be imported), ``target``, ``whole_batch``, ``processes`` and
    ``ignore_device_moves`` are as for `make_plan`. All other options are fields of the spec, and stay as they
    are given. Raises ``SpecError`` if the memory or the kind of a device is not known, and ``BudgetError`` if
    nothing fits.
    """
    return _auto(model, args, kwargs, **options).plan


def _auto(
    model: nn.Module,
    args: Example,
    kwargs: Mapping[str, Any] | None,
    *,
    devices: Iterable[Any] | str | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    whole_batch: bool = False,
    processes: bool = False,
    ignore_device_moves: bool = False,
    **options: Unpack[SpecFields],
) -> Answer:
    spec = _wanted(devices, options)
    loss = _given_loss(loss_fn, target, whole_batch=whole_batch)
    if loss is not None:
        over_batch = {} if not whole_batch or "schedule" in options else {"schedule": "GPipe"}
        spec = spec.model_copy(update={"loss": loss.spec, **over_batch})
    with_known_devices(spec)  # `choose_spec` does it too, after the model is recorded
    program, leaves = lower_call(
        model, args, kwargs, spec, ignore_device_moves=ignore_device_moves, searched=True
    )
    make = JudgingPlanner(program, leaves, processes=processes, loss=loss)
    return choose_spec(spec, make)


def largest(
    model: nn.Module,
    inputs_of: Callable[[int], Example],
    sizes: Sequence[int],
    *,
    devices: Iterable[Any] | str | None = None,
    processes: bool = False,
    **options: Unpack[SpecFields],
) -> Largest:
    """The largest of ``sizes`` (ascending) with which ``model`` can be trained on ``devices``.

    ``inputs_of(size)`` makes the arguments of ``forward`` for a size, which may be on ``meta``. The strategy
    is chosen anew for every size, as by `auto_plan`, whose ``devices``, ``processes`` and ``options`` these
    are. The result has ``size`` and ``answer.spec`` of the largest that fits (None if none does), and
    ``tried``.

    Of sizes, the first, second, fourth, … are tried until one does not fit, then those between.
    """
    wanted = _wanted(devices, options)

    def case_of(size: int) -> Case:
        program, leaves = lower_call(model, inputs_of(size), None, wanted, searched=True)
        return Case(make=JudgingPlanner(program, leaves, processes=processes), wanted=wanted)

    return find_largest(sizes, case_of)


def _wanted(devices: Iterable[Any] | str | None, options: SpecFields) -> PlacementSpec:
    fields: dict[str, Any] = dict(options)
    if fields.get("offload_overlap"):  # says how to offload, where the search does
        fields.setdefault("offload", "auto")
    if devices is not None:
        one = isinstance(devices, str | Mapping | DeviceSpec)
        fields["devices"] = [devices] if one else list(devices)
    return PlacementSpec.model_validate(fields)


def simulate(
    model: nn.Module,
    plan: Plan | SpecSource,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    whole_batch: bool = False,
    run_on: str | None = None,
    processes: bool = False,
    ignore_device_moves: bool = False,
) -> SimulationReport:
    """The peak bytes of each device in a training step of the emitted module, on simulated devices.

    Stages on CUDA devices keep what CUDA's kernels would keep (`placer.cost.kernels`); no GPU is needed.
    With ``run_on="cpu"`` the result is for ``compile(…, run_on="cpu")``.

    With ``processes`` every device has a process of its own, as under ``torchrun``. ``loss_fn``, ``target``,
    ``whole_batch`` and ``ignore_device_moves`` are as for `make_plan`.
    """
    with errors_located(plan):
        wanted = plan if isinstance(plan, Plan) else as_spec(plan, model)
        program, leaves = lower_call(
            model, args, kwargs, wanted, ignore_device_moves=ignore_device_moves
        )
        loss = _given_loss(loss_fn, target, whole_batch=whole_batch)
        make = JudgingPlanner(program, leaves, processes=processes, loss=loss)
        planned = plan_of(wanted, make) if isinstance(wanted, PlacementSpec) else wanted
        return simulate_captured(
            program, planned, leaves, make.loss_of(planned), run_on=run_on, processes=processes
        )


def simulate_captured(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    loss: Loss,
    *,
    run_on: str | None = None,
    processes: bool = False,
) -> SimulationReport:
    """`simulate` for a model that has been captured, called with the tensors ``inputs``."""
    if plan.shard_state != "none" and not processes:
        raise one_copy()
    program = rewritten(program, plan.rewrites)
    check_plan(plan, program)
    loss.check_rows(batch_rows(program, inputs))
    return simulate_plan(program, plan, inputs, loss, processes=processes, run_on=run_on)


def _given_loss(
    loss_fn: Callable[..., Tensor] | None, target: Any, *, whole_batch: bool = False
) -> Loss | None:
    """The caller's loss; None if there is none. Raises ``PlacerError`` for a target without a function."""
    if loss_fn is not None:
        require_function(loss_fn)
        loss = loss_of(loss_fn, target, whole_batch=whole_batch)
        if target is None:
            return loss
        return replace(loss, function=lambda output, part: loss_fn(output, unmarked(part)))
    if whole_batch:
        remedy = 'pass loss_fn= too, or write it in the spec: "loss": {"function": …, "whole_batch": true}'
        raise PlacerError("whole_batch", "is given without a loss", remedy)
    if target is not None:
        raise PlacerError("target", "is given without a loss", "pass loss_fn= too")
    return None


def as_spec(source: SpecSource, model: nn.Module | None = None) -> PlacementSpec:
    """``source`` itself if it is a spec, otherwise the spec for ``model`` that `load_spec` reads from it.

    Raises ``SpecError``, and ``PlacerError`` for an object of another type.
    """
    if not isinstance(source, PlacementSpec | Mapping | str | Path):
        raise PlacerError(
            "spec",
            f"is a {type(source).__name__}",
            "pass the path of a spec, a dict, a PlacementSpec, or a Plan",
        )
    if isinstance(source, PlacementSpec):
        return source
    return load_spec(source, layer_paths=partial(layer_paths_of, model))


def layer_paths_of(model: Any) -> list[str] | None:
    """The paths of the model's modules, to check a spec against; None if it is no module."""
    if not isinstance(model, nn.Module):
        return None
    return [path for path, _ in model.named_modules(remove_duplicate=False)]


def example_call(
    model: nn.Module, args: Example, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as the ``forward`` of ``model`` gets them.

    A single tensor need not be in a tuple, nor need a single dict, unless ``forward`` has arguments with the
    names of its keys. Raises ``CaptureError`` if they are neither a tuple of arguments nor keywords.
    """
    if isinstance(args, Tensor) or is_mark(args) or takes_dict(model, args):
        args = (args,)
    if not isinstance(args, tuple | list):
        remedy = "write (x,)"
        if isinstance(args, Mapping):
            remedy = (
                "write kwargs={...} if its keys are arguments of forward, or (batch,) if it is one"
            )
        raise CaptureError("args", f"is a {type(args).__name__}, not a tuple of inputs", remedy)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(
            "kwargs",
            f"is a {type(kwargs).__name__}, not a dict of keyword arguments",
            "write several inputs as one tuple: (x, y)",
        )
    return tuple(args), dict(kwargs or {})


def takes_dict(model: nn.Module, value: Any) -> bool:
    """Is ``value`` a dict that can only be one argument of ``forward``, of which none is named like a key?"""
    if not isinstance(value, Mapping) or not isinstance(model, nn.Module):
        return False
    parameters = inspect.signature(model.forward).parameters
    named = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    near = any(isinstance(key, str) and nearest(key, parameters) for key in value)
    return bool(parameters) and not named and not near


def _check_one_process(plan: Plan) -> None:
    """Raise ``PlacerError`` if ``plan`` needs a process per device."""
    if plan.shard_state != "none":
        raise one_copy()
    if plan.batch_norm == "sync" and plan.replicas > 1:
        raise PlacerError(
            "/batch_norm",
            "replicas in one process run one after the other and cannot share batch statistics",
            "start one process per device (torchrun), or use 'per_microbatch'",
        )


def _refuse_placed(model: nn.Module) -> None:
    """Raise ``CaptureError`` if ``model`` is a placed module or has one inside."""
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, PlacedModule):
            raise CaptureError(
                path or "the model",
                "is placed already: it runs its own stages, and its layers cannot be placed again",
                "place the plain model that it was made from, after "
                "plain.load_state_dict(placed.state_dict()); a module around a placed one needs no placing",
            )


def check_layers(model: nn.Module, spec: PlacementSpec) -> None:
    """Raise ``SpecError`` for patterns of layers that ``model`` has not, and for kinds of other devices."""
    if problems := [*kind_problems(spec), *layer_problems(spec, layer_paths_of(model) or ())]:
        raise SpecError(SpecError.UNNAMED, problems)


def lower_call(
    model: nn.Module,
    args: Example,
    kwargs: Mapping[str, Any] | None,
    wanted: PlacementSpec | Plan,
    *,
    ignore_device_moves: bool = False,
    rewrites: Sequence[Rewrite] = (),
    searched: bool = False,
) -> tuple[Program, list[Tensor]]:
    """The program of a call, to be placed as ``wanted`` says, and the call's tensors.

    The rewrites are those of a plan, or else ``rewrites``. Where the strategy is ``searched``, it is
    recorded for several slices; if these are refused, ``mixing`` says why. The tensors are on ``meta`` if
    ``wanted`` says how many rows a step has, and the example has others. Raises ``CaptureError``, and
    ``SpecError``, which for other things than ``batch`` comes before anything is recorded.
    """
    positional, keywords = example_call(model, args, kwargs)
    _refuse_placed(model)
    if isinstance(model, nn.Module) and isinstance(wanted, PlacementSpec):
        check_layers(model, wanted)
    # A plan is for training, too.
    with torch.inference_mode(False), recorded_under(planned_autocast(wanted.precision)):
        rewrites = wanted.rewrites if isinstance(wanted, Plan) else rewrites
        call = model, positional, keywords, rewrites
        record = partial(lower, *call, ignore_device_moves=ignore_device_moves)
        rules = split_rules(wanted)
        try:
            program = record(rules=replace(rules, is_split=searched or rules.is_split))
        except CaptureError as error:
            if rules.is_split or not searched:
                raise
            program = record(rules=rules)
            why = f"{error.where}: {error.problem}; {error.remedy}"
            program = replace(program, captured=replace(program.captured, mixing=why))
    tensors = flatten_call(program.call, positional, keywords)
    return program, inputs_of_step(program, tensors, wanted.batch)
