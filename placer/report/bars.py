"""HTML bars of each stage's memory by kind, with a line at the budget."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from placer.plan.types import DevicePeak, Plan, StagePlan
from placer.quantities import format_bytes
from placer.report.figures import KINDS, memory_parts

_MEANING = {
    "parameters": "weights of the stage",
    "gradients": "one per weight",
    "optimizer": "state of the optimizer",
    "buffers": "such as running statistics",
    "saved": "activations kept for backward, of all micro-batches in flight",
    "boundary": "received from another stage",
    "transient": "live only while an operation runs",
}


def memory_bars(plan: Plan) -> str:
    """One bar per stage: bytes by kind up to the peak; hatched before the budget, what tensors may not use.

    The peak of a stage is red if its device does not fit.
    """
    ends = [stage.memory.peak for stage in plan.stages]
    ends += [stage.budget for stage in plan.stages if stage.budget is not None]
    scale = 100 / max(1, *ends)
    devices = {device.device: device for device in plan.devices}
    rows = "".join(_row(stage, devices[stage.devices[0]], scale) for stage in plan.stages)
    label = "Memory by kind of each stage against its budget"
    return f'<div class="bars" role="img" aria-label="{label}">{rows}</div>'


def legend(plan: Plan) -> str:
    """The colours that `memory_bars` uses for this plan."""
    present = [
        kind for kind in KINDS if any(memory_parts(stage.memory)[kind] for stage in plan.stages)
    ]
    items = [
        f'<span title="{escape(_MEANING[kind])}"><i class="k-{kind}"></i>{kind}</span>'
        for kind in present
    ]
    if any(device.budget is not None and _withheld(device) for device in plan.devices):
        items.append(
            '<span title="not for tensors"><i class="k-reserve"></i>context and reserve</span>'
        )
    if any(stage.budget is not None for stage in plan.stages):
        items.append('<span><i class="k-budget"></i>budget</span>')
    return f'<p class="legend">{"".join(items)}</p>'


def _row(stage: StagePlan, device: DevicePeak, scale: float) -> str:
    peak, budget = stage.memory.peak, stage.budget
    pieces, left = [], 0.0
    for kind, nbytes in memory_parts(stage.memory).items():
        if nbytes:
            title = f"{kind}: {format_bytes(nbytes)}"
            pieces.append(bar_part(f"k-{kind}", left, nbytes * scale, title))
            left += nbytes * scale
    limit = ""
    if budget is not None:
        free = max(0, budget - _withheld(device))
        reserve = f"context and reserve: {format_bytes(_withheld(device))}"
        pieces.append(bar_part("reserve", free * scale, (budget - free) * scale, reserve))
        pieces.append(bar_part("budget", budget * scale, 0, f"budget: {format_bytes(budget)}"))
        limit = f" <small>of {format_bytes(budget)}</small>"
    figure = f'<b class="{"" if device.fits else "bad"}">{format_bytes(peak)}</b>'
    label = f"<b>stage {stage.index}</b> <small>{escape(_devices(stage))}</small>"
    return bar_row(label, pieces, f"{figure}{limit}")


def _withheld(device: DevicePeak) -> int:
    """The bytes of a budget that are not for tensors."""
    return device.context + device.reserve


def bar_row(label: str, parts: Iterable[str], figure: str) -> str:
    """A row with a bar of ``parts`` (`bar_part`), a label before it and a figure after it, all HTML."""
    return (
        f'<div class="row"><span>{label}</span>'
        f'<div class="bar">{"".join(parts)}</div><span>{figure}</span></div>'
    )


def bar_part(name: str, left: float, width: float, title: str) -> str:
    """A part of a bar; ``left`` and ``width`` are percents of its length, ``title`` is text."""
    style = f"left:{left:.3f}%;width:{width:.3f}%"
    return f'<i class="{name}" style="{style}" title="{escape(title)}"></i>'


def _devices(stage: StagePlan) -> str:
    more = len(stage.devices) - 1
    return stage.devices[0] + (f" + {more} replica{'s' * (more > 1)}" if more else "")
