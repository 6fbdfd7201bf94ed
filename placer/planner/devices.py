"""Finds the memory of a spec's devices, from the spec, this machine, or the catalogue of device kinds."""

from __future__ import annotations

import os

import torch

from placer.errors import SpecError, first_few
from placer.machine.catalogue import DeviceKind, kinds_with_memory
from placer.machine.devices import device_kind, device_type
from placer.machine.links import Link, Links
from placer.machine.machine import device_kind_of, find_machine
from placer.partition import DeviceSlot
from placer.quantities import format_bytes
from placer.spec import DeviceSpec, PlacementSpec

_SHOWN = 8  # devices that an error lists


def device_slot(device: DeviceSpec, spec: PlacementSpec) -> DeviceSlot:
    """The device with its budget: as given, else of its kind, else of this machine's GPU, else none.

    The GPUs of this machine count if it has all that the spec names: with some of another machine, budgets
    of these alone would look like room that the others lack.
    """
    kind = _kind(device, spec)
    budget = device.memory
    if budget is None and device.kind is not None:
        budget = kind.memory
    if budget is None and device.name.startswith("cuda") and _are_here(spec):
        budget = torch.cuda.get_device_properties(device.name).total_memory
    on_cuda = device_type(device.name) == "cuda"
    allocator = (device.allocator or "expandable") if on_cuda else None
    context = (kind.context if spec.context is None else spec.context) if on_cuda else 0
    reserve = kind.reserve(budget or 0) if spec.reserve is None else spec.reserve
    return DeviceSlot(
        name=device.name,
        kind=kind,
        budget=budget,
        reserve=0 if budget is None else reserve,
        context=context,
        allocator=allocator,
    )


def _are_here(spec: PlacementSpec) -> bool:
    """Whether this machine has all GPUs that ``spec`` names."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [torch.device(d.name) for d in spec.devices if d.name.startswith("cuda")]
    return all((device.index or 0) < count for device in named)


def _kind(device: DeviceSpec, spec: PlacementSpec) -> DeviceKind:
    machine = None if spec.machine is None else find_machine(spec.machine)
    if machine is not None and device.kind == machine.kind:
        return device_kind_of(machine)
    return device_kind(device.name, device.kind)


def links_of(spec: PlacementSpec) -> Links:
    """The links between the devices of ``spec``: its machine's, or those of one node with the slowest one."""
    if spec.machine is not None:
        return find_machine(spec.machine).links
    slowest = min(device_kind(d.name, d.kind).link_bandwidth for d in spec.devices)
    return Links(inside=Link(send=slowest, bus=slowest))


def with_all_devices(spec: PlacementSpec) -> PlacementSpec:
    """``spec`` with all devices of its machine; with a number of stages it has those of one replica."""
    if spec.machine is None:
        return spec
    names = find_machine(spec.machine).names()
    return spec.with_devices([spec.devices[0].model_copy(update={"name": x}) for x in names])


def with_lead_devices(spec: PlacementSpec) -> PlacementSpec:
    """``spec`` with one device for each stage that is split in space, which stands for all of its shards.

    That is the shard with the least memory, under the name of the first one. Layers may name any of them.
    """
    shards = spec.space.number
    if shards == 1:
        return spec
    lead_of: dict[str, str] = {}
    leads = []
    for start in range(0, len(spec.devices), shards):
        row = spec.devices[start : start + shards]
        lead_of.update({device.name: row[0].name for device in row})
        rooms = [device_slot(device, spec).room for device in row]
        known = [room for room in rooms if room is not None]
        least = row[rooms.index(min(known))] if known else row[0]
        leads.append(least.model_copy(update={"name": row[0].name}))
    layers = {pattern: lead_of[name] for pattern, name in spec.layers.items()}
    return spec.with_devices(leads).with_layers(layers)


def kind_problems(spec: PlacementSpec) -> list[tuple[str, str, str]]:
    """Devices of ``spec`` whose kind is of another type of device.

    A CPU's kind has no context and no reserve, so a plan for a GPU would seem to fit.
    """
    problems = []
    for index, device in enumerate(spec.devices):
        kind, given = device_kind(device.name, device.kind), device.kind
        if given and (kind.device_type == "cpu") != device.name.startswith("cpu"):
            problem = (
                f"{given} is the kind of a {kind.device_type} device, and this is {device.name}"
            )
            remedy = f"leave it out, or measure: placer calibrate --device {device.name} -o FILE"
            problems.append((f"/devices/{index}/kind", problem, remedy))
    return problems


def check_kinds(spec: PlacementSpec, fingerprint: str) -> None:
    """Raise ``SpecError`` for `kind_problems`, and for profiles of another model or precision.

    A model is known by its ``fingerprint``.
    """
    problems = kind_problems(spec)
    told = {where for where, _, _ in problems}
    for index, device in enumerate(spec.devices):
        kind, given = device_kind(device.name, device.kind), device.kind
        wrong = profile_problem(kind, fingerprint, spec.precision)
        if wrong is not None and f"/devices/{index}/kind" not in told:
            problem, remedy = wrong
            problems.append((f"/devices/{index}/kind", f"{given} {problem}", remedy))
    if problems:
        raise SpecError(SpecError.UNNAMED, problems)


def profile_problem(kind: DeviceKind, fingerprint: str, precision: str) -> tuple[str, str] | None:
    """Why the profile of ``kind`` is not one of this model and precision, and the remedy; None if it is."""
    profile = kind.profile
    if profile is None:
        return None
    if profile.fingerprint != fingerprint:
        problem = "is the profile of another model"
    elif profile.precision != precision:
        problem = f"was measured in {profile.precision}, not {precision}"
    else:
        return None
    return problem, f"measure this one: placer profile MODEL --precision {precision} -o FILE"


def fields_that_need_memory(spec: PlacementSpec) -> tuple[str, ...]:
    """The fields of ``spec``, as JSON, that need devices of known memory.

    The objective "memory" compares shares of it, or bytes if it is known of none. If none is given then,
    "auto" recomputes and offloads for the least peak, which needs no budget; not on CPUs, whose memory is
    this machine's.
    """
    given = any(d.memory or d.kind or d.name.startswith("cpu") for d in spec.devices)
    least = spec.objective == "memory" and not given
    fields = ["microbatches"]
    if spec.training and not least:
        fields += ["checkpoint", "offload"]
    budgets = [device_slot(device, spec).budget for device in spec.devices]
    some = spec.objective == "memory" and None in budgets and any(budgets)
    automatic = [f'"{field}": "auto"' for field in fields if getattr(spec, field) == "auto"]
    return (*['"objective": "memory"'] * some, *automatic)


def likely_kernels(spec: PlacementSpec) -> str:
    """The device type whose kernels are assumed until the device of each node is known."""
    return "cuda" if any(device_type(d.name) == "cuda" for d in spec.devices) else "cpu"


def with_known_memory(spec: PlacementSpec, why: str) -> PlacementSpec:
    """``spec`` with a memory for every device; CPU devices share this machine's memory evenly.

    Raises ``SpecError``, at the first of them, if the memory of other devices is not known. ``why`` says in
    the error what depends on it, such as "how few devices suffice".
    """
    unknown: dict[str, int] = {}  # name -> index
    devices = []
    for index, device in enumerate(spec.devices):
        if device_slot(device, spec).budget is None and device.name.startswith("cpu"):
            share = machine_memory() // _cpu_devices(spec)
            device = device.model_copy(update={"memory": share})
        elif device_slot(device, spec).budget is None:
            unknown[device.name] = index
        devices.append(device)
    if unknown:
        kinds = ", ".join(f"{k.name} ({format_bytes(k.memory or 0)})" for k in kinds_with_memory())
        name, index = next(iter(unknown.items()))
        problem = (
            f"the memory of {', '.join(first_few(list(unknown), _SHOWN))} is not known (it is not given, and "
            f"this machine has no such device), and {why} depends on it"
        )
        remedy = f'write {{"name": "{name}", "memory": "16GiB"}}, or "kind": one of {kinds}'
        raise SpecError(SpecError.UNNAMED, [(f"/devices/{index}", problem, remedy)])
    return spec.with_devices(devices)


def machine_memory() -> int:
    """The bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_devices(spec: PlacementSpec) -> int:
    """The number of CPU devices in ``spec``, at least 1."""
    rows = [[device.name for device in spec.devices], *spec.replica_devices]
    return max(1, len({name for row in rows for name in row if name.startswith("cpu")}))
