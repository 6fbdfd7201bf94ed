"""Write when each device computes during a step, and its memory, as a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.errors import PlanError
from placer.files import writing
from placer.plan.types import Plan
from placer.report.view import shown_spans, span_style
from placer.timeline import Span

if TYPE_CHECKING:
    from placer.executor.watch import StepReport
    from placer.simulation import SimulationReport


def write_trace(
    plan: Plan,
    path: str | Path,
    *,
    simulation: SimulationReport | None = None,
    measured: StepReport | None = None,
) -> None:
    """Write `step_trace` of ``plan`` to ``path``.

    Raises ``PlanError`` when it cannot be written, or has nothing to show because times are not known.
    """
    if plan.step_seconds is None and measured is None:
        raise PlanError(str(path), "a trace needs times, which are not known", "give --kind")
    with writing(Path(path), PlanError):
        Path(path).write_text(
            json.dumps(step_trace(plan, simulation, measured)) + "\n", encoding="utf-8"
        )


def step_trace(
    plan: Plan, simulation: SimulationReport | None = None, measured: StepReport | None = None
) -> dict[str, Any]:
    """The step in the Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

    There is a row per device and per link (with a process per device, of one replica), and with a
    ``simulation`` a counter per device: the bytes of its tensors by kind. A ``measured`` step
    (``placed.report()``) has its rows below the predicted ones. Times are in microseconds, and whole
    nanoseconds, because Perfetto leaves out a span that begins before the last one on its row has ended, by
    however little.
    """
    each = ", every replica" if plan.processes and plan.replicas > 1 else ""
    events = list(_rows(shown_spans(plan), 0, f"predicted{each}"))
    events += _counters(simulation) if simulation is not None else ()
    events += _rows(measured.spans, 1, "measured") if measured is not None else ()
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _rows(spans: Sequence[Span], pid: int, title: str) -> Iterator[dict[str, Any]]:
    names = dict.fromkeys(n for span in spans for n in span.on)
    rows = {name: number for number, name in enumerate(names)}
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}}
    for name, number in rows.items():
        args = {"name": name}
        yield {"ph": "M", "pid": pid, "tid": number, "name": "thread_name", "args": args}
    for span in spans:
        for name in span.on:
            event = {
                "ph": "X",
                "pid": pid,
                "tid": rows[name],
                "name": span.name,
                "cat": span_style(span),
                "ts": round(span.start * 1e9) / 1e3,
                "dur": (round(span.end * 1e9) - round(span.start * 1e9)) / 1e3,
            }
            yield {**event, "args": {"bytes": span.nbytes}} if span.nbytes else event


def _counters(simulation: SimulationReport) -> Iterator[dict[str, Any]]:
    for device in simulation.devices:
        for point in device.memory_over_time:
            event = {"ph": "C", "pid": 0, "name": f"memory of {device.device}", "cat": "memory"}
            yield {**event, "ts": round(point.seconds * 1e9) / 1e3, "args": dict(point.kinds)}
