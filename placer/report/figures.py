"""Numbers and sentences that are derived from a plan, for all forms of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placer.plan.step_spans import step_spans
from placer.plan.summary import describe_host, describe_runtime
from placer.plan.types import DevicePeak, HostPeak, Plan, StageMemory, Transfer
from placer.quantities import format_bytes, format_count
from placer.timeline import idle_share

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

_SIMULATED = ("peak", "workspaces", "reserved", "context", "starved")
KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "saved",
    "boundary",
    "transient",
)


def memory_parts(memory: StageMemory) -> dict[str, int]:
    """Bytes by kind that add up to the peak, the longest-lived kinds first.

    If the kinds add up to more than the peak, because not all of them are alive at that moment, the
    last ones are reduced.

    >>> kinds = dict.fromkeys(KINDS, 0) | {"parameters": 4, "saved": 5, "transient": 3}
    >>> memory_parts(StageMemory(**kinds, peak=10))["transient"]
    1
    """
    left = memory.peak
    parts = {}
    for kind in KINDS:
        parts[kind] = min(getattr(memory, kind), left)
        left -= parts[kind]
    parts["transient"] += left
    return parts


def bubble(plan: Plan) -> float | None:
    """The share of the step, without the optimizer, in which devices are idle; None if times are not known.

    It is for as many micro-batches as the rows of the example input make.
    """
    return None if plan.step_seconds is None else idle_share(step_spans(plan))


def needs_device_table(plan: Plan) -> bool:
    """Is a table of devices needed besides that of stages?

    It is if there are replicas, if a device has several stages, or if reserved memory is known.
    """
    return len(plan.devices) != len(plan.stages) or plan.replicas > 1 or shows_reserved(plan)


def shows_reserved(plan: Plan) -> bool:
    """Is the memory that torch's allocator reserves known for any device?"""
    return any(device.reserved is not None for device in plan.devices)


def data_transfers(plan: Plan) -> tuple[list[Transfer], str]:
    """The transfers of tensors, the largest first, and a phrase about the others, if there are any.

    The others are values without bytes, such as sizes of a tensor that a later stage reads.
    """
    found = [transfer for transfer in plan.transfers if transfer.nbytes]
    found.sort(key=lambda t: (-t.nbytes, t.source, t.target, t.value))
    others = len(plan.transfers) - len(found)
    return found, f"and {others} without tensors, such as sizes" if others else ""


def verdict(plan: Plan) -> list[str]:
    """Sentences on whether the plan fits: one per device that overflows, worst first, or that it fits.

    The first says for which runtime.     Another sentence names the devices whose memory is unknown.
    """
    over = sorted((d for d in plan.devices if not d.fits), key=lambda d: d.headroom or 0)
    limited = [d for d in plan.devices if d.budget is not None]
    unknown = [d.device for d in plan.devices if d.budget is None]
    found = [overflow_text(device) for device in over]
    found += host_verdict(plan.host)
    runtime = describe_runtime(plan)
    if found and runtime:
        found[0] += f", {runtime}"
    if limited and not found:
        least = min(limited, key=lambda d: d.headroom or 0)
        slow = ", but expect slow steps" * bool(plan.starved)
        headroom = format_bytes(least.headroom or 0)
        where = f", {runtime}" if runtime else ""
        found.append(f"fits{slow}: {least.device} has the least headroom, {headroom}{where}")
        found += starved_text(plan)
    if unknown:
        found.append(unknown_memory_text(unknown))
    return found


def starved_text(plan: Plan) -> list[str]:
    """A sentence on the kernels that will be slower than estimated, or an empty list."""
    starved = [
        f"{format_count(device.starved, 'kernel')} of a step on {device.device}"
        for device in plan.devices
        if device.starved
    ]
    if not starved:
        return []
    verb = "finds" if plan.starved == 1 else "find"
    return [
        f"{' and '.join(starved)} {verb} no room for the workspace that they want, so slower ones run "
        "instead; more memory or a smaller input would help"
    ]


def host_text(host: HostPeak | None) -> str:
    """A sentence on the host memory that offloaded activations take; "" if there are none."""
    if host is None:
        return ""
    least = "up to " if host.reserved is None else ""
    limit = "" if host.budget is None else f", which may give {format_bytes(host.budget)}"
    return f"offloaded activations take {least}{describe_host(host)}{limit}"


def host_verdict(host: HostPeak | None) -> list[str]:
    """A sentence by how much the host memory overflows, or an empty list if it does not."""
    if host is None or host.fits:
        return []
    over = format_bytes(-(host.headroom or 0))
    return [f'does not fit: the host is {over} over its "host_memory" ({describe_host(host)})']


def unknown_memory_text(devices: Sequence[str]) -> str:
    """A sentence: it is unknown whether the plan fits on ``devices``."""
    whose = "its" if len(devices) == 1 else "their"
    return f"unknown whether it fits on {', '.join(devices)}: give {whose} memory"


def overflow_text(device: DevicePeak) -> str:
    """A sentence by how much ``device`` overflows, with the sum of what it needs."""
    return (
        f"does not fit: {device.device} is {format_bytes(-(device.headroom or 0))} over "
        f"({needs_text(device)} > {format_bytes(device.budget or 0)})"
    )


def needs_text(device: DevicePeak) -> str:
    """The sum that must stay within the budget of ``device``, as text."""
    if device.reserved is None:
        parts = [f"{format_bytes(device.peak)} of tensors"]
    else:
        parts = [f"{format_bytes(device.reserved)} reserved by torch's allocator"]
    if device.context:
        parts.append(f"{format_bytes(device.context)} context")
    if device.reserve:
        parts.append(f"{format_bytes(device.reserve)} kept free")
    return " + ".join(parts)


def simulated_devices(
    simulation: SimulationReport | Mapping[str, Any] | None,
) -> Mapping[str, Mapping[str, Any]]:
    """Device -> its values in the JSON of ``simulate --json``, from a report or from that JSON."""
    if simulation is None:
        return {}
    data = simulation if isinstance(simulation, Mapping) else simulation.to_json()
    devices: Mapping[str, Mapping[str, Any]] = data["devices"]
    return devices


def simulated_peaks(simulation: SimulationReport | Mapping[str, Any] | None) -> dict[str, int]:
    """Device -> simulated peak bytes, from a report or from what ``simulate --json`` prints."""
    return {name: int(device["peak"]) for name, device in simulated_devices(simulation).items()}


def memory_rule(plan: Plan) -> str:
    """A sentence on what is compared with the budgets; "" if it is only tensors."""
    limited = [d for d in plan.devices if d.budget is not None]
    if not any(d.context or d.reserve for d in limited):
        return ""
    taken = "reserved" if any(d.reserved is not None for d in limited) else "peak"
    context = " + context" if any(d.context for d in limited) else ""
    sizes = {d.reserve for d in limited}
    amounts = " to ".join(format_bytes(size) for size in sorted({min(sizes), max(sizes)}))
    reserve = f" + {amounts} kept free" if any(sizes) else ""
    return f"a plan fits when {taken}{context}{reserve} stay within the budget"


def with_simulation(plan: Plan, simulation: SimulationReport | Mapping[str, Any] | None) -> Plan:
    """``plan`` with what every device needs in the simulation, if there is one."""
    simulated = simulated_devices(simulation)
    devices = []
    for device in plan.devices:
        found = simulated.get(device.device, {})
        devices.append(replace(device, **{k: found[k] for k in _SIMULATED if k in found}))
    return replace(plan, devices=tuple(devices))


LARGEST_HEADERS = ("bytes", "layer", "made in", "name", "shape")


def moment_text(device: Mapping[str, Any]) -> str:
    """The moment of a simulated device's peak, such as "backward of decoder.0"."""
    where = device["layer"] or device["node"]
    return f"{device['phase']} of {where}" if where else str(device["phase"])


def largest_rows(device: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Rows for the largest tensors at the peak of a simulated device; columns: `LARGEST_HEADERS`."""
    return [
        (
            format_bytes(tensor["bytes"]),
            tensor["layer"] or "the model",
            tensor["kind"],
            tensor["name"].rpartition(".")[2],
            "x".join(map(str, tensor["shape"])) or "scalar",
        )
        for tensor in device.get("largest", ())
    ]


def relative_difference(predicted: int, simulated: int) -> str:
    """The error of the prediction relative to the simulated bytes, as a percentage.

    >>> relative_difference(99, 100), relative_difference(99999, 100000)
    ('-1.0%', '0.0%')
    """
    if not simulated:
        return ""
    tenths = round(1000 * (predicted - simulated) / simulated)
    return f"{tenths / 10:+.1f}%" if tenths else "0.0%"
