"""Sentences on whether a plan fits, and on what is compared with the budgets."""

from __future__ import annotations

from placer.errors import some_names
from placer.plan.summary import describe_host, describe_runtime
from placer.plan.types import DevicePeak, HostPeak, Plan
from placer.quantities import format_bytes, format_count

_SHOWN = 4  # devices that do not fit


def verdict(plan: Plan) -> list[str]:
    """Sentences on whether the plan fits: one per device that overflows, worst first, or that it fits.

    Of many devices, the fullest have one of their own. The first says for which runtime. One names the
    devices whose memory is unknown.
    """
    over = sorted((d for d in plan.devices if not d.fits), key=lambda d: d.headroom or 0)
    limited = [d for d in plan.devices if d.budget is not None]
    unknown = [d.device for d in plan.devices if d.budget is None]
    found = [
        f"does not fit: {device.device} is {format_bytes(-(device.headroom or 0))} over "
        f"({needs_text(device)} > {format_bytes(device.budget or 0)})"
        for device in over[:_SHOWN]
    ]
    if (more := len(over) - _SHOWN) > 0:
        found.append(f"does not fit: {format_count(more, 'more device')}, by no more than these")
    if plan.host is not None and not plan.host.fits:
        over_host = format_bytes(-(plan.host.headroom or 0))
        needed = describe_host(plan.host)
        found.append(f'does not fit: the host is {over_host} over its "host_memory" ({needed})')
    misfits = len(found)
    if limited and not misfits:
        least = min(limited, key=lambda d: d.headroom or 0)
        slow = ", but expect slow steps" * bool(plan.starved)
        headroom = format_bytes(least.headroom or 0)
        found.append(f"fits{slow}: {least.device} has the least headroom, {headroom}")
    if found and (runtime := describe_runtime(plan)):
        found[0] += f", {runtime}"
    if not misfits and plan.starved:
        found.append(_starved_text(plan))
    if unknown:
        whose = "its" if len(unknown) == 1 else "their"
        found.append(f"unknown whether it fits on {some_names(unknown)}: give {whose} memory")
    return found


def _starved_text(plan: Plan) -> str:
    """A sentence on the kernels that will be slower than estimated."""
    starved = " and ".join(
        f"{format_count(device.starved, 'kernel')} of a step on {device.device}"
        for device in plan.devices
        if device.starved
    )
    verb = "finds" if plan.starved == 1 else "find"
    return (
        f"{starved} {verb} no room for the workspace that they want, so slower ones run instead; more "
        "memory or a smaller input would help"
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


def host_text(host: HostPeak | None) -> str:
    """A sentence on the host memory that offloaded activations take; "" if there are none."""
    if host is None:
        return ""
    least = "up to " if host.reserved is None else ""
    limit = "" if host.budget is None else f", which may give {format_bytes(host.budget)}"
    return f"offloaded activations take {least}{describe_host(host)}{limit}"


def memory_rule(plan: Plan) -> str:
    """A sentence on what is compared with the budgets; "" if it is only tensors."""
    limited = [d for d in plan.devices if d.budget is not None]
    reserved = any(d.reserved is not None for d in limited)
    context = " + context" * any(d.context for d in limited)
    free = " + kept free" * any(d.reserve for d in limited)
    if not context and not free:
        return ""
    return f"a plan fits when {'reserved' if reserved else 'peak'}{context}{free} stay within the budget"
