"""The passes in order: spec -> program -> cost -> planner -> plan -> emit -> executor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from placer.emit import emit_stages, materialize
from placer.errors import CaptureError, PlacerError
from placer.executor.cuda_allocator import prepare_allocator
from placer.executor.device_map import map_devices
from placer.executor.distributed.job.assignment import Job, find_job
from placer.executor.module import PlacedModule
from placer.plan.check import check_plan, require_fit
from placer.plan.types import Plan
from placer.planner.auto import choose_spec
from placer.planner.remedies import misfit_error
from placer.program import Program, capture_model, flatten_call
from placer.simulation import SimulationReport, simulate_plan
from placer.simulation.judge import Planner, plan_maker
from placer.simulation.ranks import simulate_ranks
from placer.spec import DeviceSpec, PlacementSpec, load_spec
from placer.versions import require

SpecSource = PlacementSpec | Mapping[str, Any] | str | Path


def make_plan(
    model: nn.Module,
    spec: SpecSource,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    processes: bool = False,
    ignore_device_moves: bool = False,
) -> Plan:
    """The plan for ``model`` under ``spec`` for inputs like ``args`` and ``kwargs``.

    Nothing is allocated: model and inputs may live on ``meta``. With ``processes`` the plan is for
    one process per device (``torchrun``), and its peaks are those of a dry run of every rank.
    `compile` plans so by itself inside a job. A plan that overflows a budget has ``fits`` False. A dry run
    decides that for CUDA devices, where it goes through a model of torch's allocator, and on others where
    an estimate is near its budget.

    ``ignore_device_moves``: the model was split by hand, and the devices that its forward moves
    tensors to (``x.to("cuda:1")``) are ignored, for the plan says where everything runs. Raises
    ``SpecError``, ``CaptureError``, and ``VersionError`` when the installed torch cannot do this.
    """
    wanted = as_spec(spec)
    program, leaves = _capture(model, args, kwargs, ignore_device_moves=ignore_device_moves)
    return plan_maker(program, leaves, processes=processes)(wanted)


def compile(
    model: nn.Module,
    spec_or_plan: SpecSource | Plan,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: str | Path | None = None,
    initialize: Callable[[nn.Module], None] | None = None,
    run_on: str | None = None,
    ignore_device_moves: bool = False,
) -> PlacedModule:
    """``model`` placed as the spec or plan says: a plain ``nn.Module`` to train or run.

    The caller's model is left as it is: parameters are copied to their devices, one at a time.
    Parameters on ``meta`` are read from ``weights`` (a safetensors or torch file) or made by their
    modules' initialisers. ``run_on`` runs every stage on that one device (``"cpu"`` to try a spec
    without its GPUs). ``ignore_device_moves`` is as for `make_plan`. In a job of several processes
    (``torchrun``) the result is this rank's part of the model, and every rank makes the call: see
    `placer.executor.distributed`.

    Raises ``SpecError``, ``CaptureError``, ``DeviceError``, ``PlanError`` when a plan belongs to
    another model, ``BudgetError`` when the placement does not fit, and ``VersionError`` when the
    installed torch cannot run it, before anything else is done.
    """
    job = find_job()
    file = Path(weights) if weights is not None else None

    def plan_here() -> tuple[Program, Plan]:
        wanted = spec_or_plan if isinstance(spec_or_plan, Plan) else as_spec(spec_or_plan)
        require("running" if job is None else "a process per device")
        program, leaves = _capture(model, args, kwargs, ignore_device_moves=ignore_device_moves)
        return program, _plan_or_refuse(wanted, program, leaves, job)

    if job is not None:
        # torch.distributed takes a while to import.
        from placer.executor.distributed.failures.broadcast import failure_told
        from placer.executor.distributed.launch import launch

        with failure_told(job) as failures:
            program, plan = plan_here()
            return launch(
                model,
                program,
                plan,
                job,
                failures=failures,
                weights=file,
                initialize=initialize,
                run_on=run_on,
            )
    program, plan = plan_here()
    _check_one_process(plan)
    staged = emit_stages(program, *plan.parts)
    places = map_devices(plan, run_on)
    prepare_allocator(plan, itertools.chain(*places))
    homes = {name: places[0][stage].device for name, stage in staged.state_stage.items()}
    placed = materialize(model, homes, weights=file, initialize=initialize)
    return PlacedModule(placed, plan=plan, staged=staged, places=places)


def _plan_or_refuse(
    wanted: PlacementSpec | Plan, program: Program, inputs: Sequence[Tensor], job: Job | None
) -> Plan:
    """The plan to run. Raises ``PlanError`` for one of another model, ``BudgetError`` if it does not fit.

    In a job of several processes that is whether every rank fits. All ranks find the same, each by
    itself: nothing has been said between them yet.
    """
    in_job = job is not None
    make = Planner(program, inputs, processes=in_job, verdict_only=in_job)
    if isinstance(wanted, Plan):
        check_plan(wanted, program)
        judged_again = in_job and not wanted.processes
        plan = make.judge(wanted) if judged_again else wanted
        require_fit(plan, among_ranks=judged_again)
        return plan
    plan = make(wanted)
    if not plan.fits:
        raise misfit_error(program, wanted, inputs, plan, make)
    return plan


def auto_spec(
    model: nn.Module,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Iterable[Any] | str,
    objective: str = "memory",
    processes: bool = False,
    ignore_device_moves: bool = False,
    **options: Any,
) -> PlacementSpec:
    """A spec under which ``model`` fits ``devices``, using as few of them as it needs.

    ``devices`` are device names, ``{"name", "memory", "kind"}`` objects or ``DeviceSpec`` values, or
    a single one of them; ``processes`` and ``ignore_device_moves`` are as for `make_plan`,
    ``options`` are other fields of the spec. Raises ``BudgetError`` when none fits.
    """
    one = isinstance(devices, str | Mapping | DeviceSpec)
    fields = {
        "devices": [devices] if one else list(devices),
        "objective": objective,
        **options,
    }
    spec = PlacementSpec.model_validate(fields)
    program, leaves = _capture(model, args, kwargs, ignore_device_moves=ignore_device_moves)
    return choose_spec(program, spec, leaves, plan_maker(program, leaves, processes=processes))


def simulate(
    model: nn.Module,
    plan: Plan | SpecSource,
    args: Sequence[Any] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    run_on: str | None = None,
    processes: bool = False,
    ignore_device_moves: bool = False,
) -> SimulationReport:
    """Per-device peak bytes of one training step of the emitted module, on simulated devices.

    A stage on a CUDA device keeps what CUDA's kernels keep (`placer.cost.kernels`), for which no GPU
    is needed; ``run_on="cpu"`` says what ``compile(…, run_on="cpu")`` would hold.

    With ``processes`` every device has a process of its own, as under ``torchrun``.
    ``ignore_device_moves`` is as for `make_plan`.
    """
    wanted = plan if isinstance(plan, Plan) else as_spec(plan)
    program, leaves = _capture(model, args, kwargs, ignore_device_moves=ignore_device_moves)
    if isinstance(wanted, PlacementSpec):
        plan = plan_maker(program, leaves, processes=processes)(wanted)
    else:
        plan = wanted
    return simulate_captured(
        program, plan, leaves, loss_fn=loss_fn, run_on=run_on, processes=processes
    )


def simulate_captured(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    run_on: str | None = None,
    processes: bool = False,
) -> SimulationReport:
    """`simulate` for a model that is captured already, called with the tensors ``inputs``."""
    check_plan(plan, program)
    if processes:
        return simulate_ranks(program, plan, inputs, loss_fn=loss_fn, run_on=run_on)
    return simulate_plan(program, plan, inputs, loss_fn=loss_fn, run_on=run_on)


def as_spec(source: SpecSource) -> PlacementSpec:
    """``source`` itself if it is a spec, else what `load_spec` reads from it.

    Raises ``SpecError``, and ``PlacerError`` for what can be no spec.
    """
    if not isinstance(source, PlacementSpec | Mapping | str | Path):
        raise PlacerError(
            "spec",
            f"is a {type(source).__name__}",
            "pass the path of a spec, a dict, a PlacementSpec, or a Plan",
        )
    return source if isinstance(source, PlacementSpec) else load_spec(source)


def example_call(
    args: Sequence[Any] | Tensor, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as ``forward`` gets them; one tensor may stand for itself.

    Raises ``CaptureError`` for what is neither a tuple of arguments nor a dict of keywords.
    """
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        remedy = "pass a dict as kwargs={...}" if isinstance(args, Mapping) else "write (x,)"
        raise CaptureError("args", f"is a {type(args).__name__}, not a tuple of inputs", remedy)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(
            "kwargs",
            f"is a {type(kwargs).__name__}, not a dict of keyword arguments",
            "write several inputs as one tuple: (x, y)",
        )
    return tuple(args), dict(kwargs or {})


def _check_one_process(plan: Plan) -> None:
    """Raise ``PlacerError`` for what needs a process per device."""
    if plan.batch_norm == "sync" and plan.replicas > 1:
        raise PlacerError(
            "/batch_norm",
            "replicas in one process run one after the other and cannot share batch statistics",
            "start one process per device (torchrun), or use 'per_microbatch'",
        )


def _capture(
    model: nn.Module,
    args: Sequence[Any] | Tensor,
    kwargs: Mapping[str, Any] | None,
    *,
    ignore_device_moves: bool,
) -> tuple[Program, list[Tensor]]:
    positional, keywords = example_call(args, kwargs)
    program = capture_model(model, positional, keywords, ignore_device_moves=ignore_device_moves)
    return program, flatten_call(program.call, positional, keywords)
