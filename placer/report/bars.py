"""Memory by kind as bars against the budget line, in inline SVG."""

from __future__ import annotations

from html import escape

from placer.plan.types import Plan, StagePlan
from placer.report.figures import KINDS, memory_parts
from placer.units import format_bytes

_WIDTH, _LEFT, _RIGHT = 940, 130, 100  # of the drawing, its labels and its figures, in SVG units
_ROW, _BAR = 46, 22
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
    """One bar per stage: bytes by kind up to the peak; the reserve is hatched before the budget."""
    ends = [stage.memory.peak for stage in plan.stages]
    ends += [stage.budget for stage in plan.stages if stage.budget is not None]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(1, *ends)
    height = _ROW * len(plan.stages) + 8
    rows = "".join(_row(stage, scale, _ROW * i) for i, stage in enumerate(plan.stages))
    return (
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Memory by kind of each stage against its budget">'
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="6"/>'
        f"</pattern></defs>{rows}</svg>"
    )


def legend(plan: Plan) -> str:
    """The colours that `memory_bars` uses for this plan."""
    present = [
        kind for kind in KINDS if any(memory_parts(stage.memory)[kind] for stage in plan.stages)
    ]
    items = [
        f'<span title="{escape(_MEANING[kind])}"><i class="k-{kind}"></i>{kind}</span>'
        for kind in present
    ]
    if any(stage.budget is not None and stage.reserve for stage in plan.stages):
        items.append('<span title="kept free"><i class="k-reserve"></i>reserve</span>')
    if any(stage.budget is not None for stage in plan.stages):
        items.append('<span><i class="k-budget"></i>budget</span>')
    return f'<p class="legend">{"".join(items)}</p>'


def _row(stage: StagePlan, scale: float, top: int) -> str:
    middle = top + 8 + _BAR / 2
    pieces = [
        f'<text class="label" x="0" y="{middle - 1:.1f}">stage {stage.index}</text>',
        f'<text class="small" x="0" y="{middle + 13:.1f}">{escape(_devices(stage))}</text>',
    ]
    x = float(_LEFT)
    for kind, nbytes in memory_parts(stage.memory).items():
        if not nbytes:
            continue
        width = nbytes * scale
        pieces.append(
            f'<rect class="k-{kind}" x="{x:.2f}" y="{top + 8}" width="{width:.2f}" '
            f'height="{_BAR}"><title>{kind}: {format_bytes(nbytes)}</title></rect>'
        )
        x += width
    end = x
    if stage.budget is not None:
        line = _LEFT + stage.budget * scale
        free = line - stage.reserve * scale
        pieces.append(
            f'<rect class="reserve" x="{max(free, _LEFT):.2f}" y="{top + 8}" '
            f'width="{line - max(free, _LEFT):.2f}" height="{_BAR}" fill="url(#hatch)">'
            f"<title>reserve: {format_bytes(stage.reserve)}</title></rect>"
            f'<line class="budget" x1="{line:.2f}" x2="{line:.2f}" y1="{top + 2}" '
            f'y2="{top + 14 + _BAR}"><title>budget: {format_bytes(stage.budget)}</title></line>'
        )
        end = max(end, line)
    over = stage.budget is not None and stage.memory.peak + stage.reserve > stage.budget
    pieces.append(
        f'<text class="figure{" bad" if over else ""}" x="{end + 8:.1f}" y="{middle - 1:.1f}">'
        f"{format_bytes(stage.memory.peak)}</text>"
    )
    if stage.budget is not None:
        pieces.append(
            f'<text class="small" x="{end + 8:.1f}" y="{middle + 13:.1f}">'
            f"of {format_bytes(stage.budget)}</text>"
        )
    return "<g>" + "".join(pieces) + "</g>"


def _devices(stage: StagePlan) -> str:
    more = len(stage.devices) - 1
    return stage.devices[0] + (f" + {more} replica{'s' * (more > 1)}" if more else "")
