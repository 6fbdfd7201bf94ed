"""Builds the plan for a captured model under a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from placer.cost import (
    CostEstimates,
    CostTable,
    Estimate,
    Loss,
    batch_rows,
    find_loss,
    with_added_rows,
    with_divided_gradients,
    with_regions,
)
from placer.errors import CaptureError
from placer.machine.devices import device_type
from placer.partition import Partition, PlanningOptions, TableCache, choose_partition
from placer.plan.types import Plan
from placer.planner.activation_policy import PolicyChoice, choose_policy, is_heavy
from placer.planner.assemble import assemble_plan
from placer.planner.batch import microbatch_choices, microbatch_inputs, microbatch_rows
from placer.planner.devices import (
    check_kinds,
    device_slot,
    fields_that_need_memory,
    likely_kernels,
    with_known_memory,
    with_lead_devices,
)
from placer.planner.host_memory import HOST_NAME
from placer.planner.resolve import (
    check_shard_over,
    check_supported,
    count_replicas,
    planning_options,
    policies_of,
    wanted_devices,
    wanted_regions,
)
from placer.precision import keeps_casts
from placer.program import Program
from placer.regions import RegionKey
from placer.spec import PlacementSpec


def build_plan(
    program: Program,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    *,
    pins: Mapping[str, str] | None = None,
    estimate: Estimate | None = None,
    processes: bool = False,
    corrections: Mapping[str, int] | None = None,
    tables: TableCache | None = None,
    stop_at_share: float = 0.0,
    loss: Loss | None = None,
) -> Plan:
    """The plan for ``program`` under ``spec``, for a batch shaped like ``inputs`` (any device).

    ``pins`` has nodes and the devices they must be on, in addition to the spec's layers. ``estimate`` (by
    default a new `CostEstimates`) and ``tables`` are caches that plans of one capture share, so that the
    model runs once per size of micro-batch. ``processes`` asks for a plan with one process per device.
    ``corrections`` has, for a device of the first replica or for the host (`HOST_NAME`), the bytes that it
    is known to need beyond its estimate. With ``stop_at_share`` the plan only has to fit: the search ends
    with the first plan that fills no device beyond this share of its budget, and otherwise minimizes memory.
    ``loss`` is the loss to count; by default the one that the spec names, or one that is assumed.

    A plan that exceeds a budget is returned with ``fits`` False. Raises ``SpecError`` if the spec's layers
    or devices do not match the model, ``PlacerError`` for what is not supported.
    """
    spec = spec.on_its_stages()
    check_supported(spec, processes=processes)
    check_kinds(spec, program.captured.fingerprint)
    for use in fields_that_need_memory(spec):
        spec = with_known_memory(spec, use)
    if stop_at_share:
        spec = spec.model_copy(update={"objective": "memory"})
    replicas = count_replicas(spec)
    check_shard_over(spec, replicas)
    rows = spec.device_rows(replicas)
    corrections = _by_stage(corrections or {}, spec)
    spec = with_lead_devices(spec)
    pins = {**wanted_devices(program, spec), **(pins or {})}
    keys = wanted_regions(program, spec)
    estimate = estimate or CostEstimates(program)
    tables = tables or TableCache()
    loss = loss or find_loss(spec.loss)
    loss.check_rows(batch_rows(program, inputs))
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
                estimate=estimate,
                processes=processes,
                corrections=corrections,
                rows=rows,
                tables=tables,
                stop_at_share=stop_at_share,
                loss=loss,
            )
        except CaptureError:
            if not plans:
                raise
            break  # with "auto": too few rows for the model, such as a single one for BatchNorm
        plans.append(plan)
        if stop_at_share and plan.fits:
            break
    return min(plans, key=lambda plan: (not plan.fits, plan.overflow_bytes, plan.rank_time))


def _plan_for(
    program: Program,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    *,
    replicas: int,
    microbatches: int,
    pins: Mapping[str, str],
    keys: Sequence[RegionKey | None],
    estimate: Estimate,
    processes: bool,
    corrections: Mapping[str, int],
    rows: Sequence[Sequence[str]],
    tables: TableCache,
    stop_at_share: float,
    loss: Loss,
) -> Plan:
    """The plan for these numbers of replicas and micro-batches, on the devices of ``rows``."""
    slots = [
        replace(device_slot(device, spec), correction=corrections.get(device.name, 0))
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
        microbatch_inputs(program, inputs, sizes[0]),
        training=spec.training,
        precision=spec.precision,
        loss=loss,
        keeps_casts=keeps_casts(
            spec.precision, microbatches, own_weights=processes or replicas * spec.space.number == 1
        ),
    )
    choices = policies_of(spec)
    if any(key is not None and key.recompute for key in keys):
        options = options.with_whole_backwards()
    recomputing = options
    if any(choice.recompute for choice in choices):
        recomputing = options.with_whole_backwards()
    offloaded = any(key is not None and key.offload for key in keys)

    def of_step(costs: CostTable) -> CostTable:
        divided = with_divided_gradients(costs, options.state_layout.gradients)
        return with_added_rows(divided, len(sizes))

    def place(kernels: str | Mapping[str, str], pins: Mapping[str, str]) -> PolicyChoice:
        def choose(
            options: PlanningOptions, costs: CostTable, more_pins: Mapping[str, str]
        ) -> Partition:
            wanted = {**more_pins, **pins}
            return choose_partition(
                program, costs, slots, wanted, options, tables=tables, stop_at_share=stop_at_share
            )

        plain = of_step(costs_of(kernels=kernels, offloads=offloaded))
        first = choose(options, with_regions(plain, keys), {})
        heavy = is_heavy(first, choices, slots, options)
        used = recomputing if heavy else options
        if heavy and spec.offload:  # needs another run of the model
            plain = of_step(costs_of(kernels=kernels, offloads=True))
        return choose_policy(
            program,
            plain,
            keys,
            choices if heavy else (),
            slots,
            used,
            partial(choose, used),
            first=first if used == options else None,
            at_once=stop_at_share > 0,
        )

    light = place(likely_kernels(spec), pins)
    if len({device_type(device.name) for device in spec.devices}) > 1:
        # Now that the device of each node is known, plan again with the kernels of that device.
        stages = light.partition.stages
        placed = {node: stage.devices[0] for stage in stages for node in stage.nodes}
        kernels = {node: device_type(name) for node, name in placed.items()}
        light = place(kernels, placed)
    return assemble_plan(program, spec, light, rows, microbatches, loss, pins)


def _by_stage(corrections: Mapping[str, int], spec: PlacementSpec) -> dict[str, int]:
    """The largest correction of the devices of each stage, by the first of them."""
    found: dict[str, int] = {}
    index_of = {device.name: i for i, device in enumerate(spec.devices)}
    for name, nbytes in corrections.items():
        if name in index_of:
            name = spec.devices[index_of[name] // spec.space.number * spec.space.number].name
        found[name] = max(found.get(name, 0), nbytes)
    return found
