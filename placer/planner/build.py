"""Build a plan: what the spec asks for, resolved against a captured model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor

from placer.cost import CostEstimates, CostTable, ScaledCosts, device_type, with_regions
from placer.errors import CaptureError
from placer.partition import DeviceSlot, Partition, PlanningOptions, TableCache, choose_partition
from placer.plan.types import Plan, everything_fits
from placer.planner.activation_policy import PolicyChoice, choose_policy, is_heavy
from placer.planner.assemble import assemble_plan
from placer.planner.devices import (
    check_profiles,
    device_slot,
    likely_kernels,
    memory_uses,
    with_known_memory,
)
from placer.planner.host_memory import HOST_NAME
from placer.planner.resolve import (
    check_supported,
    count_replicas,
    microbatch_choices,
    microbatch_inputs,
    microbatch_rows,
    planning_options,
    policies_of,
    wanted_devices,
    wanted_regions,
)
from placer.program import Program
from placer.regions import RegionKey
from placer.spec import PlacementSpec


class PlanMaker(Protocol):
    """How specs are planned for one model and its inputs, by whoever judges the plans."""

    @property
    def costs(self) -> CostEstimates:
        """The model's costs, shared by all plans that it makes."""

    def __call__(self, spec: PlacementSpec) -> Plan:
        """The plan for ``spec``."""

    def try_out(self, spec: PlacementSpec) -> Plan:
        """A plan that says whether ``spec`` fits; it is not the fastest.

        It need not be near a budget for the sake of time, so it seldom needs a dry run. One that does
        not fit by its estimates is returned as it is, even if a dry run might say otherwise.
        """

    def guess(self, spec: PlacementSpec) -> Plan:
        """About what `try_out` would return, from the costs that are known, without a run of the model."""


def build_plan(
    program: Program,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    *,
    pins: Mapping[str, str] | None = None,
    costs: CostTable | None = None,
    estimate: CostEstimates | ScaledCosts | None = None,
    processes: bool = False,
    corrections: Mapping[str, int] | None = None,
    tables: TableCache | None = None,
    enough: float = 0.0,
) -> Plan:
    """The plan for ``program`` under ``spec``, for a batch shaped like ``inputs`` (any device).

    ``pins`` are nodes and the devices they must be on, beyond what the spec's layers say; ``costs``
    those of the spec's micro-batch, where they are known already; ``estimate`` is shared by plans of
    one capture, so that the model is run once per micro-batch. ``processes``: the plan is for one
    process per device. ``corrections`` are bytes that a device (of the first replica, by name), or the
    host (`HOST_NAME`), is known to hold beyond what its estimate says: that much of its budget is left
    free. ``tables`` are shared by plans of one capture, too. With ``enough`` only whether a plan fits
    matters: the search ends with the first that fills no device beyond this share of its budget, else
    it is for the least memory. A plan that overflows a budget is returned with ``fits`` False. Raises
    ``SpecError`` when the spec's layers or devices do not go with the model, ``PlacerError`` for what is
    not supported.
    """
    check_supported(spec)
    check_profiles(spec, program.fingerprint)
    for use in memory_uses(spec):
        spec = with_known_memory(spec, use)
    if enough:
        spec = spec.model_copy(update={"objective": "memory"})
    replicas = count_replicas(spec)
    pins = {**wanted_devices(program, spec), **(pins or {})}
    keys = wanted_regions(program, spec)
    estimate = estimate or CostEstimates(program)
    tables = tables or TableCache()
    plans: list[Plan] = []
    for microbatches in microbatch_choices(spec, program, replicas):
        try:
            plan = _plan_for(
                program,
                spec,
                inputs,
                replicas=replicas,
                microbatches=microbatches,
                pins=pins,
                keys=keys,
                costs=costs,
                estimate=estimate,
                processes=processes,
                corrections=corrections or {},
                tables=tables,
                enough=enough,
            )
        except CaptureError:
            if not plans:
                raise
            break  # of "auto": too few rows for the model, such as a single one for BatchNorm
        plans.append(plan)
        if enough and plan.fits:
            break
    best = min(plans, key=lambda plan: (not plan.fits, plan.overflow_bytes, plan.step_seconds))
    return _with_whole_budgets(best, spec) if corrections else best


def _plan_for(
    program: Program,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    *,
    replicas: int,
    microbatches: int,
    pins: Mapping[str, str],
    keys: Sequence[RegionKey | None],
    costs: CostTable | None,
    estimate: CostEstimates | ScaledCosts,
    processes: bool,
    corrections: Mapping[str, int],
    tables: TableCache,
    enough: float,
) -> Plan:
    """The plan for this number of replicas and micro-batches."""
    slots = [
        _corrected(device_slot(device, spec), corrections.get(device.name, 0))
        for device in spec.devices
    ]
    sizes = microbatch_rows(program, inputs, replicas, microbatches)
    options = planning_options(
        spec,
        sizes,
        processes=processes,
        replicas=replicas,
        host_correction=corrections.get(HOST_NAME, 0),
    )
    costs_of = partial(
        estimate,
        microbatch_inputs(program, inputs, replicas, microbatches),
        training=spec.training,
        precision=spec.precision,
    )
    choices = policies_of(spec)
    offloaded = any(key is not None and key.offload for key in keys)

    def place(kernels: str | Mapping[str, str], pins: Mapping[str, str]) -> PolicyChoice:
        choose = partial(_choose, program, slots, pins, options, tables, enough)
        plain = costs or costs_of(kernels=kernels, offloads=offloaded)
        first = choose(with_regions(plain, keys), {})
        heavy = is_heavy(first, choices, slots, options)
        if heavy and spec.offload and costs is None:  # one more run, of no use to what fits without
            plain = costs_of(kernels=kernels, offloads=True)
        return choose_policy(
            program,
            plain,
            keys,
            choices if heavy else (),
            slots,
            options,
            choose,
            first=first,
            at_once=enough > 0,
        )

    light = place(likely_kernels(spec), pins)
    if costs is None and len({device_type(device.name) for device in spec.devices}) > 1:
        # Where each node runs is known now: once more, with its own kernels.
        stages = light.partition.stages
        placed = {node: stage.devices[0] for stage in stages for node in stage.nodes}
        kernels = {node: device_type(name) for node, name in placed.items()}
        light = place(kernels, placed)
    return assemble_plan(program, spec, light, options, spec.device_rows(replicas), microbatches)


def _corrected(slot: DeviceSlot, nbytes: int) -> DeviceSlot:
    """``slot`` with so many bytes less to use."""
    if slot.budget is None or not nbytes:
        return slot
    return replace(slot, budget=max(1, slot.budget - nbytes))


def _with_whole_budgets(plan: Plan, spec: PlacementSpec) -> Plan:
    """``plan``, made with corrections, with the budgets that its devices have without them."""
    budgets = [device_slot(device, spec).budget for device in spec.devices]
    rows = spec.device_rows(plan.replicas)
    whole = {name: budget for row in rows for name, budget in zip(row, budgets, strict=True)}
    devices = tuple(replace(device, budget=whole[device.device]) for device in plan.devices)
    stages = tuple(replace(stage, budget=whole[stage.devices[0]]) for stage in plan.stages)
    fits = everything_fits(devices, plan.host)
    return replace(plan, fits=fits, devices=devices, stages=stages)


def _choose(
    program: Program,
    slots: Sequence[DeviceSlot],
    pins: Mapping[str, str],
    options: PlanningOptions,
    tables: TableCache,
    enough: float,
    costs: CostTable,
    more_pins: Mapping[str, str],
) -> Partition:
    return choose_partition(
        program, costs, slots, {**more_pins, **pins}, options, tables=tables, enough=enough
    )
