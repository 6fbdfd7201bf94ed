"""Make a device kind that has the measured seconds of a model's nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from placer.cost import CostTable, estimate_costs
from placer.cost.loss import ASSUMED
from placer.errors import DeviceError
from placer.executor.module import PlacedModule, runtime_of
from placer.executor.place_model import place_model
from placer.executor.places.device_map import map_devices
from placer.machine.catalogue import DeviceKind, PeakMemory, Profile
from placer.machine.devices import device_type
from placer.machine.rates import Rates
from placer.partition.stage_cost.optimizer import optimizer_passes
from placer.planner.build import build_plan
from placer.profiling.calibration import gpu_memory, require_device
from placer.profiling.clocks import Clock, clock_for
from placer.profiling.memory import ComparedMemory, compare_memory
from placer.profiling.nodes import LOSS, NodeTimes, measure_nodes
from placer.program import Program
from placer.program.objects.python_random import keep_random
from placer.spec import PlacementSpec
from placer.spec.fields import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A profile: the device kind with it, the measured times and, on a GPU, memory, and estimated costs."""

    kind: DeviceKind
    times: NodeTimes
    costs: CostTable
    memory: ComparedMemory | None = None


def profile_model(
    program: Program,
    model: nn.Module,
    leaves: Sequence[Tensor],
    *,
    base: DeviceKind,
    device: str = "cpu",
    precision: Precision = "fp32",
    training: bool = True,
    rounds: int = 5,
    clock: Clock | None = None,
    each_round: Callable[[int], None] = lambda _: None,
) -> Measured:
    """Measure a copy of ``model`` on ``device`` with `measure_nodes`; the model must have its data.

    The kind in the result is ``base`` with the profile, and on a GPU with its memory and context. For
    other batch sizes of the model, measured times are scaled in proportion to the estimates. Raises
    ``DeviceError`` if the device does not exist or is too small.
    """
    place = torch.device(device)
    require_device(place)
    memory = None
    try:
        with keep_random(place):
            if place.type == "cuda":
                memory = compare_memory(
                    program, model, leaves,
                    device=device, place=place, precision=precision, training=training,
                )  # fmt: skip
            copied = copy.deepcopy(model).to(place)
            inputs = [t.detach().to(place).requires_grad_(t.requires_grad) for t in leaves]
            placed = _placed(program, model, inputs, device, precision) if training else None

            def placed_step() -> None:
                assert placed is not None
                runtime_of(placed).step_leaves(inputs, loss_fn=ASSUMED)
                placed.zero_grad(set_to_none=True)

            times = measure_nodes(
                program,
                copied,
                inputs,
                placed_step=None if placed is None else placed_step,
                device=place,
                clock=clock or clock_for(place),
                precision=precision,
                training=training,
                rounds=rounds,
                each_round=each_round,
            )
            base = with_measured_memory(base, place)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            device,
            f"is too small for a step of the whole model ({str(error).splitlines()[0]})",
            "profile a smaller batch or input: its times are scaled to others",
        ) from error
    costs = estimate_costs(
        program, leaves, training=training, precision=precision, kernels=device_type(device)
    )
    kind = _with_profile(
        base,
        program,
        costs,
        times,
        precision,
        memory=None if memory is None else memory.measured,
        inputs=["x".join(map(str, t.shape)) for t in leaves],
    )
    return Measured(kind=kind, times=times, costs=costs, memory=memory)


def with_measured_memory(kind: DeviceKind, place: torch.device) -> DeviceKind:
    """``kind`` with the memory and the context of this GPU; the same kind on a CPU."""
    if place.type != "cuda":
        return kind
    memory, context = gpu_memory(place)
    return replace(kind, memory=memory, context=context)


def _placed(
    program: Program, model: nn.Module, inputs: Sequence[Tensor], device: str, precision: str
) -> PlacedModule:
    """``model`` as a placed module, all on ``device``."""
    spec = PlacementSpec.model_validate({"devices": [device], "precision": precision})
    plan = build_plan(program, spec, inputs)
    return place_model(model, program, plan, map_devices(plan))


def _with_profile(
    base: DeviceKind,
    program: Program,
    costs: CostTable,
    times: NodeTimes,
    precision: Precision,
    *,
    memory: PeakMemory | None = None,
    inputs: Sequence[str] = (),
) -> DeviceKind:
    base = replace(base, profile=None)
    estimated = costs.work.seconds(base)
    names = (*costs.names, LOSS)
    forward, backward = (
        {name: (measured.get(name, 0.0), float(estimate.device[i])) for i, name in enumerate(names)}
        for measured, estimate in (
            (times.forward, estimated.forward),
            (times.backward, estimated.backward),
        )
    )
    rates = dict(base.rates.table)
    trained = costs.trained_nbytes
    if trained and times.optimizer:
        key = ("optimizer", "float32")
        bandwidth = optimizer_passes("adam") * trained / times.optimizer
        rates[key] = replace(rates[key], overhead=0.0, bandwidth=bandwidth)
    return replace(
        base,
        rates=Rates(rates),
        profile=Profile(
            fingerprint=program.captured.fingerprint,
            precision=precision,
            inputs=tuple(inputs),
            forward=forward,
            backward=backward,
            forward_launch=times.forward_launch,
            backward_launch=times.backward_launch,
            memory=memory,
        ),
    )
