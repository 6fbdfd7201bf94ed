"""Makes a dry run of a plan's emitted module: a few training steps on fake tensors, with a `Ledger`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from placer.cost import Loss, device_kernels, device_type, find_loss, updates_together
from placer.emit import StagedModel
from placer.executor.attribution import Attribution
from placer.executor.module import PlacedModule, runtime_of
from placer.executor.place import CALLER, HOST, Place, current_place, on
from placer.executor.place_model import place_model
from placer.executor.transfer import copy_to
from placer.operands import tensors_of_tree
from placer.plan.types import DevicePeak, Plan
from placer.program import FakeConverter, Program
from placer.program.call import placeholder_names
from placer.program.row_gradients import clear_row_gradients
from placer.simulation.ledger import Ledger
from placer.simulation.optimizers import RowUpdates, make_optimizer
from placer.simulation.steps import explained_failure, record_steps
from placer.simulation.types import DeviceSimulation, SimulationReport
from placer.simulation.usage import (
    DeviceTimeline,
    device_timeline,
    measure,
    measure_host,
    steps_of,
)
from placer.timeline import Moment, StepPosition, Timeline, host_usage

_LARGEST_SHOWN = 10


def simulate_plan(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    loss: Loss | None = None,
    *,
    run_on: str | None = None,
) -> SimulationReport:
    """Run the plan's training step a few times on simulated devices and report every device's peak.

    ``inputs`` are the flattened tensors of the whole batch, on any device. Several steps are needed
    because the optimizer's state exists from the second step on, and torch's allocator then has a cache.
    ``loss`` (by default the one that the plan counts) runs for each micro-batch, with its slice of the
    target copied to the last stage's device. Every stage runs the kernels of its device, or with
    ``run_on`` those of that device, as after ``placer.compile(…, run_on="cpu")``. Raises ``DeviceError``
    if an operation would mix devices.
    """
    timeline = _run(program, plan, inputs, loss or counted_loss(plan), run_on=run_on)
    return SimulationReport(
        devices=tuple(
            describe_device(each, device_timeline(timeline, each.device), run_on=run_on)
            for each in plan.devices
        ),
        host=measure_host(plan.host, host_usage(timeline, HOST.name)),
        step_ok=True,
    )


def simulate_steps(
    program: Program, plan: Plan, inputs: Sequence[Tensor], loss: Loss | None = None
) -> Timeline:
    """The timeline of the plan's first steps on all its devices, in less time than `simulate_plan`.

    If possible, forward and backward run only once, because later steps differ from the first only by
    the optimizer, which creates its state in the first step. With several replicas (which refresh their
    copies of weights) and with inputs that keep their gradients, every step is run.
    """
    plain = plan.replicas == 1 and not any(leaf.requires_grad for leaf in inputs)
    loss = loss or counted_loss(plan)
    return _run(program, plan, inputs, loss, once=plain and plan.training)


def counted_loss(plan: Plan) -> Loss:
    """The loss that ``plan`` counts; the one that is assumed, if only the plan's maker has it."""
    return find_loss(None if plan.loss is None else plan.loss.spec)


def with_copied_target(loss: Loss) -> Callable[[Any, Any], Tensor]:
    """``loss``, with its target copied to the place where it runs, as from the caller's device to a GPU."""

    def run(result: Any, target: Any = None) -> Tensor:
        place = current_place()
        assert place is not None
        return loss(result, tree_map_only(Tensor, partial(copy_to, place), target))

    return run


def _run(
    program: Program,
    plan: Plan,
    inputs: Sequence[Tensor],
    loss: Loss,
    *,
    run_on: str | None = None,
    once: bool = False,
) -> Timeline:
    """The timeline of as many training steps as `steps_of` says, or for inference of a forward.

    With ``once`` the first step is recorded, and the timeline of later steps is made from it.
    """
    converter = FakeConverter()
    fake_model = converter.module(program.model)
    leaves, target = converter.tree((list(inputs), loss.target))
    cpu = torch.device("cpu")
    rows = [[Place(stage.devices[r], cpu) for stage in plan.stages] for r in range(plan.replicas)]
    with converter.running(program.conditions.guess):
        placed = place_model(fake_model, program, plan, rows)
        staged = runtime_of(placed).staged
        watch = _StepWatch(Attribution(staged.stages, program.layer_of))
        ledger = Ledger(watch.where, kernels=lambda place: device_type(run_on or place))
        _count_state(ledger, placed, staged, rows[0])
        for leaf, name in zip(leaves, placeholder_names(program.call), strict=True):
            ledger.add(leaf, CALLER, kind="input", name=name, layer="")
        for leaf in tensors_of_tree(target):
            ledger.add(leaf, CALLER, kind="input", name="target", layer="")
        explained = explained_failure(loss)
        with explained, ledger, running_kernels(plan, run_on):
            if not plan.training:
                with torch.no_grad():
                    runtime_of(placed).call_leaves(leaves)
                return ledger.timeline()
            place_of = {name: run_on or rows[0][s].name for name, s in staged.state_stage.items()}
            optimizers = _optimizers(placed, plan, place_of)
            row_updates = RowUpdates(plan.optimizer, placed.parameters())
            step = partial(
                runtime_of(placed).step_leaves,
                leaves,
                loss_fn=with_copied_target(loss),
                target=target,
            )

            def update() -> None:
                with watch.optimizing():
                    for optimizer in optimizers:
                        optimizer.step()
                    row_updates.step()

            def zero_grad() -> None:
                with watch.optimizing():
                    placed.zero_grad(set_to_none=True)
                    clear_row_gradients(placed.parameters())

            return record_steps(
                ledger,
                step,
                update,
                zero_grad,
                steps=steps_of(plan, run_on),
                once=once,
            )


@contextmanager
def running_kernels(plan: Plan, device: str | None = None) -> Iterator[None]:
    """In this block every stage runs the kernels of its device, or all of them those of ``device``."""

    def kind() -> str:
        place = current_place()
        return device_type(device or (place.name if place is not None else "cpu"))

    names = [device] if device else [name for stage in plan.stages for name in stage.devices]
    if all(device_type(name) == "cpu" for name in names):
        yield
        return
    with device_kernels(kind, half=plan.precision != "fp32"):
        yield


class _StepWatch:
    """Tells whether the optimizer or a node of the model is running."""

    def __init__(self, attribution: Attribution) -> None:
        self._attribution = attribution
        self.in_optimizer = False

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """The optimizer runs in this block."""
        self.in_optimizer = True
        with on(HOST):  # for Adam's step counts; other state is made from tensors on a device
            yield
        self.in_optimizer = False

    def where(self) -> StepPosition:
        """The phase, node and layer that is running."""
        return StepPosition(phase="optimizer") if self.in_optimizer else self._attribution.where()


def _count_state(
    ledger: Ledger, placed: PlacedModule, staged: StagedModel, homes: Sequence[Place]
) -> None:
    for kind, named in (
        ("parameter", placed.named_parameters(remove_duplicate=False)),
        ("buffer", placed.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            ledger.add(tensor, homes[staged.state_stage[name]], kind=kind, name=name)


def _optimizers(
    placed: PlacedModule, plan: Plan, place_of: Mapping[str, str]
) -> list[torch.optim.Optimizer]:
    """Optimizers that together update the parameters as torch's optimizer over all of them would."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in placed.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(place_of[name], []).append(parameter)
    if updates_together(groups):
        return [make_optimizer(plan.optimizer, group, foreach=True) for group in groups.values()]
    trained = [parameter for parameter in placed.parameters() if parameter.requires_grad]
    return [make_optimizer(plan.optimizer, trained, foreach=False)]


def describe_device(
    device: DevicePeak, run: DeviceTimeline, *, run_on: str | None = None
) -> DeviceSimulation:
    """The result of the dry run ``run`` for ``device``, next to the plan's prediction.

    With ``run_on`` the kernels were those of another device, so this device's allocator does not count.
    """
    if run_on is not None:
        device = replace(device, allocator=None, context=0)
    moment = run.timeline.peaks().get(run.place, Moment())
    found = measure(device, run)
    return DeviceSimulation(
        device=device.device,
        peak=moment.nbytes,
        workspaces=found.workspaces,
        reserved=found.reserved,
        context=found.context,
        starved=found.starved,
        predicted=device.peak,
        phase=moment.where.phase,
        node=moment.where.node,
        layer=moment.where.layer,
        operation=moment.operation,
        largest=tuple(run.timeline.live(run.place, moment)[:_LARGEST_SHOWN]),
    )
