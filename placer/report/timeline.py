"""Show when each device computes during a step: bars for the HTML page, and a trace file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from placer.errors import PlanError
from placer.files import writing
from placer.plan.step_spans import step_spans
from placer.plan.types import Plan
from placer.quantities import format_bytes, format_seconds
from placer.report.bars import bar_part, bar_row
from placer.timeline import Span, end_of

_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_MOST = 4000  # spans; for more, the page shows no bars


def timeline_bars(plan: Plan) -> str:
    """A bar per device with its computations over one step; "" if there are too many to show."""
    spans = [span for span in step_spans(plan) if span.end > span.start]
    end = end_of(spans)
    if not end or len(spans) > _MOST:
        return ""
    rows = "".join(
        bar_row(
            f"<b>{escape(device)}</b>",
            (_part(span, end) for span in found),
            f"{sum(s.end - s.start for s in found if s.kind != 'transfer') / end:.0%} busy",
        )
        for device, found in _by_device(spans, plan).items()
    )
    kinds = dict.fromkeys(_style(span) for span in spans if not _is_on_link(span, plan))
    legend = "".join(f'<span><i class="t-{kind}"></i>{kind}</span>' for kind in kinds)
    label = f"What each device does in a step of {format_seconds(end)}"
    return f'<p class="legend">{legend}</p><div class="bars" role="img" aria-label="{label}">{rows}</div>'


def write_trace(plan: Plan, path: str | Path) -> None:
    """Write `step_trace` of ``plan`` to ``path``.

    Raises ``PlanError`` when it cannot be written, or has nothing to show because times are not known.
    """
    if plan.step_seconds is None:
        raise PlanError(str(path), "a trace needs times, which are not known", "give --kind")
    with writing(Path(path), PlanError):
        Path(path).write_text(json.dumps(step_trace(plan)) + "\n", encoding="utf-8")


def step_trace(plan: Plan) -> dict[str, Any]:
    """The step in the Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

    There is a row per device and per link. Times are in microseconds.
    """
    spans = step_spans(plan)
    rows = {
        name: number for number, name in enumerate(dict.fromkeys(n for s in spans for n in s.on))
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in rows.items()
    ]
    for span in spans:
        for name in span.on:
            event = {
                "ph": "X",
                "pid": 0,
                "tid": rows[name],
                "name": span.name,
                "cat": _style(span),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
            events.append({**event, "args": {"bytes": span.nbytes}} if span.nbytes else event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _by_device(spans: Sequence[Span], plan: Plan) -> Mapping[str, list[Span]]:
    """The spans of every device, without transfers that overlap with its computations."""
    found: dict[str, list[Span]] = {device.device: [] for device in plan.devices}
    for span in spans:
        for name in () if _is_on_link(span, plan) else span.on:
            found[name].append(span)
    return found


def _is_on_link(span: Span, plan: Plan) -> bool:
    """Is it a transfer on a link, which does not occupy the devices?"""
    return not {device.device for device in plan.devices}.issuperset(span.on)


def _style(span: Span) -> str:
    if span.kind != "compute":
        return span.kind
    return _KINDS[span.name.lstrip("0123456789")[0]]


def _part(span: Span, end: float) -> str:
    size = f", {format_bytes(span.nbytes)}" if span.nbytes else ""
    seconds = span.end - span.start
    title = f"{span.name}: {format_seconds(seconds)}{size}"
    return bar_part(f"t-{_style(span)}", 100 * span.start / end, 100 * seconds / end, title)
