"""Plans for one process per device, judged by a dry run of every rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from placer.capture import Capture
from placer.plan.build import build_plan
from placer.plan.types import Plan, StageMemory
from placer.simulation.ranks import simulate_ranks
from placer.spec import PlacementSpec

_MOST_ROUNDS = 3


def plan_ranks(capture: Capture, spec: PlacementSpec, inputs: Sequence[Tensor]) -> Plan:
    """The plan for one process per device whose peaks are those of `simulate_ranks`, in bytes.

    Estimates are of one process, and torch's engine holds more: whole boundaries with their
    gradients, both halves of a split backward, buckets; and every replica has its own optimizer.
    Where a judged plan does not fit, what its devices hold beyond their estimates is taken from
    their budgets and it is planned again, at most twice: a heuristic. The first plan that fits is
    taken, else the one that overflows the least. Estimates stay for inference, and inside a job
    whose process group is there already. Raises ``PlacerError`` when the stages cannot be dealt out
    to the devices in turn.
    """
    plan = build_plan(capture, spec, inputs, processes=True)
    if not spec.training or dist.is_initialized():
        return plan
    budgets = {stage.devices[0]: stage.budget for stage in plan.stages}
    less = dict.fromkeys(budgets, 0)
    judged: list[Plan] = []
    for _ in range(_MOST_ROUNDS):
        judged.append(_judge(capture, plan, budgets, inputs))
        if judged[-1].fits:
            break
        before = dict(less)
        for now, estimate in zip(judged[-1].devices, plan.devices, strict=True):
            if now.device in less:
                less[now.device] = max(less[now.device], now.peak - estimate.peak)
        if less == before:
            break
        plan = build_plan(capture, _shrink(spec, budgets, less), inputs, processes=True)
    return min(judged, key=lambda p: (not p.fits, p.overflow_bytes))


def _shrink(
    spec: PlacementSpec, budgets: Mapping[str, int | None], less: Mapping[str, int]
) -> PlacementSpec:
    devices = []
    for device in spec.devices:
        budget = budgets.get(device.name)
        if budget is not None and less[device.name]:
            device = device.model_copy(update={"memory": max(1, budget - less[device.name])})
        devices.append(device)
    return spec.model_copy(update={"devices": tuple(devices)})


def _judge(
    capture: Capture, plan: Plan, budgets: Mapping[str, int | None], inputs: Sequence[Tensor]
) -> Plan:
    """``plan`` with the whole budgets and what every rank holds of them."""
    found = [device.peak for device in simulate_ranks(capture, plan, inputs).devices]
    names = list(dict.fromkeys(stage.devices[0] for stage in plan.stages))
    rank = list(zip(names, found, strict=True))
    devices = tuple(
        replace(device, peak=peak, budget=budgets.get(name, device.budget))
        for device, (name, peak) in zip(plan.devices, itertools.cycle(rank), strict=False)
    )
    stages = []
    for stage in plan.stages:
        name = stage.devices[0]
        # With several stages on a device the estimates of each stay: a peak is that of all.
        alone = sum(other.devices[0] == name for other in plan.stages) == 1
        memory = _with_peak(stage.memory, found[names.index(name)]) if alone else stage.memory
        stages.append(replace(stage, memory=memory, budget=budgets.get(name, stage.budget)))
    fits = all(device.fits for device in devices)
    return replace(plan, fits=fits, devices=devices, stages=tuple(stages))


def _with_peak(memory: StageMemory, peak: int) -> StageMemory:
    known = memory.parameters + memory.gradients + memory.optimizer + memory.buffers + memory.saved
    return replace(memory, peak=peak, transient=max(0, peak - known))
