"""Measure the memory that steps of a model take of a GPU, beside what a plan predicts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from placer._torch import has_expandable_segments
from placer.cost.loss import ASSUMED
from placer.executor.module import runtime_of
from placer.executor.place_model import place_model
from placer.executor.places.cuda_allocator import AllocatorWarning, prepare_allocator
from placer.executor.places.device_map import map_devices
from placer.executor.places.place import Place
from placer.machine.catalogue import PeakMemory
from placer.plan.types import DevicePeak, Plan
from placer.program import Program
from placer.simulation.judge import JudgingPlanner
from placer.simulation.optimizers import make_optimizer
from placer.simulation.usage import steps_of
from placer.spec import PlacementSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMemory:
    """What steps of a model took of a GPU, and what the plan with the model on one device predicted."""

    predicted: DevicePeak
    measured: PeakMemory


def compare_memory(
    program: Program,
    model: nn.Module,
    leaves: Sequence[Tensor],
    *,
    device: str,
    place: torch.device,
    precision: str = "fp32",
    training: bool = True,
) -> ComparedMemory:
    """Run as many steps on ``place`` as a plan for ``device`` is judged by, and measure their peaks.

    They are those of torch's allocator without what it held before. Nothing else is on the device but the
    model, its inputs and Adam; the allocator is set as for a placed module, and the plan assumes what it
    then does.
    """
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(place), torch.cuda.memory_reserved(place)
    plan = _plan(program, leaves, device, precision, training=training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AllocatorWarning)
        prepare_allocator(plan, [Place(device, place)])
    if not has_expandable_segments():
        plan = _plan(program, leaves, device, precision, training=training, allocator="default")
    _run_steps(program, model, plan, leaves, place, steps=steps_of(plan))
    measured = PeakMemory(
        allocated=torch.cuda.max_memory_allocated(place) - before[0],
        reserved=torch.cuda.max_memory_reserved(place) - before[1],
    )
    torch.cuda.empty_cache()
    return ComparedMemory(predicted=plan.devices[0], measured=measured)


def _plan(
    program: Program,
    leaves: Sequence[Tensor],
    device: str,
    precision: str,
    *,
    training: bool,
    allocator: str = "expandable",
) -> Plan:
    devices = [{"name": device, "allocator": allocator}]
    spec = {"devices": devices, "precision": precision, "training": training, "optimizer": "adam"}
    return JudgingPlanner(program, leaves)(PlacementSpec.model_validate(spec))


def _run_steps(
    program: Program,
    model: nn.Module,
    plan: Plan,
    leaves: Sequence[Tensor],
    place: torch.device,
    *,
    steps: int,
) -> None:
    torch.cuda.reset_peak_memory_stats(place)
    placed = place_model(model, program, plan, map_devices(plan, str(place)))
    inputs = [t.detach().to(place).requires_grad_(t.requires_grad) for t in leaves]
    optimizer = make_optimizer("adam", [p for p in placed.parameters() if p.requires_grad])
    for _ in range(steps):
        with nullcontext() if plan.training else torch.no_grad():
            if plan.training:
                runtime_of(placed).step_leaves(inputs, loss_fn=ASSUMED)
                optimizer.step()
                placed.zero_grad(set_to_none=True)
            else:
                runtime_of(placed).call_leaves(inputs)
    torch.cuda.synchronize(place)
