"""Write when each device computes during a step, and its memory, as a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.errors import PlanError
from placer.files import writing
from placer.plan.step_spans import step_spans
from placer.plan.types import Plan
from placer.report.view import span_style

if TYPE_CHECKING:
    from placer.simulation import SimulationReport


def write_trace(
    plan: Plan, path: str | Path, *, simulation: SimulationReport | None = None
) -> None:
    """Write `step_trace` of ``plan`` to ``path``.

    Raises ``PlanError`` when it cannot be written, or has nothing to show because times are not known.
    """
    if plan.step_seconds is None:
        raise PlanError(str(path), "a trace needs times, which are not known", "give --kind")
    with writing(Path(path), PlanError):
        Path(path).write_text(json.dumps(step_trace(plan, simulation)) + "\n", encoding="utf-8")


def step_trace(plan: Plan, simulation: SimulationReport | None = None) -> dict[str, Any]:
    """The step in the Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

    There is a row per device and per link, and with a ``simulation`` a counter per device: the bytes of its
    tensors by kind. Times are in microseconds.
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
                "cat": span_style(span),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
            events.append({**event, "args": {"bytes": span.nbytes}} if span.nbytes else event)
    events += _counters(simulation) if simulation is not None else ()
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _counters(simulation: SimulationReport) -> Iterator[dict[str, Any]]:
    for device in simulation.devices:
        for point in device.memory_over_time:
            event = {"ph": "C", "pid": 0, "name": f"memory of {device.device}", "cat": "memory"}
            yield {**event, "ts": point.seconds * 1e6, "args": dict(point.kinds)}
