"""Numbers that a reader of a plan asks for and that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placer.plan.step_spans import step_spans
from placer.plan.summary import describe_host
from placer.plan.types import DevicePeak, HostPeak, Plan, StageMemory, Transfer
from placer.timeline import idle_share
from placer.units import format_bytes

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

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
    """Bytes by kind that add up to the peak, largest-lived first.

    Kinds that are not all live at the peak's moment count with what is left of it.

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


def bubble(plan: Plan) -> float:
    """Share of the step, up to the optimizer, in which its devices compute nothing.

    The micro-batches are those that the example's rows make.
    """
    return idle_share(step_spans(plan))


def needs_device_table(plan: Plan) -> bool:
    """Does the table of stages not say it all: replicas, two stages on a device, or an allocator?"""
    return len(plan.devices) != len(plan.stages) or plan.replicas > 1 or shows_reserved(plan)


def shows_reserved(plan: Plan) -> bool:
    """Is it known of any device what torch's allocator takes?"""
    return any(device.reserved is not None for device in plan.devices)


def data_transfers(plan: Plan) -> tuple[list[Transfer], str]:
    """The transfers that have bytes, the largest first; and what is said of the others, if any.

    What a later stage reads of the shape of a tensor has none.
    """
    found = [transfer for transfer in plan.transfers if transfer.nbytes]
    found.sort(key=lambda t: (-t.nbytes, t.source, t.target, t.value))
    others = len(plan.transfers) - len(found)
    return found, f"and {others} without tensors, such as sizes" if others else ""


def verdict(plan: Plan) -> list[str]:
    """One sentence per device that overflows, worst first; that it fits when none does.

    A sentence names the devices whose memory is unknown.
    """
    over = sorted((d for d in plan.devices if not d.fits), key=lambda d: d.headroom or 0)
    limited = [d for d in plan.devices if d.budget is not None]
    unknown = [d.device for d in plan.devices if d.budget is None]
    found = [overflow_text(device) for device in over]
    found += host_verdict(plan.host)
    if limited and not found:
        least = min(limited, key=lambda d: d.headroom or 0)
        headroom = format_bytes(least.headroom or 0)
        found.append(f"fits: {least.device} has the least headroom, {headroom}")
    if unknown:
        found.append(unknown_memory_text(unknown))
    return found


def host_text(host: HostPeak | None) -> str:
    """What offloaded activations take of the host's memory, in a sentence; "" where there are none."""
    if host is None:
        return ""
    least = "up to " if host.reserved is None else ""
    limit = "" if host.budget is None else f", which may give {format_bytes(host.budget)}"
    return f"offloaded activations take {least}{describe_host(host)}{limit}"


def host_verdict(host: HostPeak | None) -> list[str]:
    """By how much the host's memory is too little, where it is."""
    if host is None or host.fits:
        return []
    over = format_bytes(-(host.headroom or 0))
    return [f'does not fit: the host is {over} over its "host_memory" ({describe_host(host)})']


def unknown_memory_text(devices: Sequence[str]) -> str:
    """That it cannot be said whether the plan fits on ``devices``."""
    whose = "its" if len(devices) == 1 else "their"
    return f"unknown whether it fits on {', '.join(devices)}: give {whose} memory"


def overflow_text(device: DevicePeak) -> str:
    """By how much ``device`` overflows, with the sum that says so."""
    return (
        f"does not fit: {device.device} is {format_bytes(-(device.headroom or 0))} over "
        f"({needs_text(device)} > {format_bytes(device.budget or 0)})"
    )


def needs_text(device: DevicePeak) -> str:
    """What must stay within the budget of ``device``, as a sum."""
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
    """Device -> what ``simulate --json`` says of it, from a report or from that JSON."""
    if simulation is None:
        return {}
    data = simulation if isinstance(simulation, Mapping) else simulation.to_json()
    devices: Mapping[str, Mapping[str, Any]] = data["devices"]
    return devices


def simulated_peaks(simulation: SimulationReport | Mapping[str, Any] | None) -> dict[str, int]:
    """Device -> simulated peak bytes, from a report or from what ``simulate --json`` prints."""
    return {name: int(device["peak"]) for name, device in simulated_devices(simulation).items()}


def memory_rule(plan: Plan) -> str:
    """What is compared with the budgets, in a sentence; "" where nothing but tensors is counted."""
    limited = [d for d in plan.devices if d.budget is not None]
    if not any(d.context or d.reserve for d in limited):
        return ""
    taken = "reserved" if any(d.reserved is not None for d in limited) else "peak"
    context = " + context" if any(d.context for d in limited) else ""
    sizes = {d.reserve for d in limited}
    amounts = " to ".join(format_bytes(size) for size in sorted({min(sizes), max(sizes)}))
    reserve = f" + {amounts} kept free" if any(sizes) else ""
    return f"a plan fits when {taken}{context}{reserve} stay within the budget"


def with_peaks(plan: Plan, simulated: Mapping[str, int]) -> Plan:
    """``plan`` with every device's peak the larger of what was predicted and simulated."""
    devices = (
        replace(device, peak=max(device.peak, simulated.get(device.device, 0)))
        for device in plan.devices
    )
    return replace(plan, devices=tuple(devices))


LARGEST_HEADERS = ("bytes", "layer", "made in", "name", "shape")


def moment_text(device: Mapping[str, Any]) -> str:
    """When a simulated device peaks, such as "backward of decoder.0"."""
    where = device["layer"] or device["node"]
    return f"{device['phase']} of {where}" if where else str(device["phase"])


def largest_rows(device: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """What was live at the peak of a simulated device, under `LARGEST_HEADERS`."""
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
    """How far the prediction is off, as a share of what was simulated.

    >>> relative_difference(99, 100), relative_difference(99999, 100000)
    ('-1.0%', '0.0%')
    """
    if not simulated:
        return ""
    tenths = round(1000 * (predicted - simulated) / simulated)
    return f"{tenths / 10:+.1f}%" if tenths else "0.0%"
