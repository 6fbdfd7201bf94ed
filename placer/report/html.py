"""Show a plan as one self-contained HTML page, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.errors import PlanError
from placer.files import writing
from placer.plan.summary import describe_step
from placer.plan.types import Plan, everything_fits
from placer.quantities import format_bytes, format_seconds
from placer.report.bars import legend, memory_bars
from placer.report.figures import (
    LARGEST_HEADERS,
    bubble,
    data_transfers,
    host_text,
    largest_rows,
    moment_text,
    relative_difference,
    shows_reserved,
    simulated_devices,
    simulated_peaks,
    verdict,
    with_simulation,
)
from placer.report.layers import compact_layers, stage_layers
from placer.report.style import STYLE
from placer.report.timeline import timeline_bars

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

_TRANSFERS_SHOWN = 200
_Cell = tuple[str, str]  # text of the cell (escaped by `_table`), CSS class


def write_html(
    plan: Plan,
    path: str | Path,
    *,
    simulation: SimulationReport | Mapping[str, Any] | None = None,
    of: str = "",
) -> None:
    """Write the page of ``plan`` to ``path``; ``of`` says of which model and inputs it is.

    ``simulation`` is a report, or the JSON that ``placer simulate --json`` prints. Raises
    ``PlanError`` when the file cannot be written.
    """
    with writing(Path(path), PlanError):
        Path(path).write_text(page(plan, simulation=simulation, of=of), encoding="utf-8")


def page(
    plan: Plan,
    *,
    simulation: SimulationReport | Mapping[str, Any] | None = None,
    of: str = "",
) -> str:
    """The page of ``plan`` as HTML text; the same plan gives the same text."""
    simulated = simulated_peaks(simulation)
    judged = with_simulation(plan, simulation)
    state = "bad"
    if everything_fits(judged.devices, plan.host):
        state = "slow" if judged.starved else "good"
    sections = [
        "<h1>Placement plan</h1>",
        f'<p class="dim">{escape(of)}</p>' if of else "",
        *(f'<p class="verdict {state}">{escape(line)}</p>' for line in verdict(judged)),
        _facts(plan),
        "<h2>Memory of each stage</h2>",
        legend(plan),
        memory_bars(plan),
        "<h2>Stages</h2>" if plan.step_seconds is None else "<h2>Stages, with estimated times</h2>",
        _stages(plan),
        _timeline(plan),
        "<h2>Devices</h2>",
        _devices(plan, simulated),
        _moments(simulation),
        "<h2>Transfers</h2>",
        _transfers(plan),
        _notes(plan),
        "<h2>Nodes</h2>",
        _nodes(plan),
        f'<p class="dim">fingerprint <code>{escape(plan.fingerprint)}</code></p>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>placer: placement plan</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in sections if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _facts(plan: Plan) -> str:
    optimizer = plan.optimizer
    if not isinstance(optimizer, str):
        optimizer = f"{optimizer['bytes_per_parameter']} bytes per parameter"
    facts = {
        "stages": str(len(plan.stages)),
        "replicas": str(plan.replicas),
        "micro-batches": str(plan.microbatches),
        "schedule": plan.schedule,
        "objective": plan.objective,
        "precision": plan.precision,
        "optimizer": optimizer if plan.training else "none (inference)",
        "estimated step": describe_step(plan),
    }
    if (idle := bubble(plan)) is not None:
        facts["bubble"] = f"{idle:.0%}"
    items = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _timeline(plan: Plan) -> str:
    bars = timeline_bars(plan)
    return f"<h2>A step in time, estimated</h2>{bars}" if bars else ""


def _stages(plan: Plan) -> str:
    rows: list[list[_Cell]] = []
    for stage, layers in zip(plan.stages, stage_layers(plan), strict=True):
        memory = stage.memory
        rows.append(
            [
                (str(stage.index), ""),
                (compact_layers(layers), "wide"),
                (", ".join(stage.devices), "name"),
                *((format_bytes(n), "number") for n in (memory.parameters, memory.saved)),
                (format_bytes(memory.peak), "number strong"),
                *(
                    (format_seconds(s), "number")
                    for s in (stage.forward_seconds, stage.backward_seconds)
                    if s is not None
                ),
            ]
        )
    headers = ["stage", "layers", "device", "parameters", "saved", "peak"]
    headers += ["forward", "backward"] * (plan.step_seconds is not None)
    return _table(headers, rows, cards=True)


def _devices(plan: Plan, simulated: Mapping[str, int]) -> str:
    rows: list[list[_Cell]] = []
    reserved = shows_reserved(plan)
    for device in plan.devices:
        on_it = [str(stage.index) for stage in plan.stages if device.device in stage.devices]
        limited = device.budget is not None
        row = [
            (device.device, "name"),
            (", ".join(on_it), ""),
            (format_bytes(device.peak), "number strong"),
        ]
        if simulated:
            row += _compared(device.peak, simulated.get(device.device))
        if reserved:
            row += [
                (format_bytes(nbytes) if nbytes else "", "number")
                for nbytes in (device.workspaces, device.reserved, device.context)
            ]
        row += [
            (format_bytes(device.reserve) if limited else "", "number"),
            (format_bytes(device.budget or 0) if limited else "not known", "number"),
            (
                format_bytes(device.headroom or 0) if limited else "",
                f"number {'good' if device.fits else 'bad'}",
            ),
        ]
        rows.append(row)
    compared = ["simulated", "difference"] if simulated else []
    taken = ["workspaces", "reserved", "context"] if reserved else []
    return _table(
        [
            "device",
            "stages",
            "predicted peak",
            *compared,
            *taken,
            "kept free",
            "budget",
            "headroom",
        ],
        rows,
        cards=True,
    )


def _moments(simulation: SimulationReport | Mapping[str, Any] | None) -> str:
    """The moment of each device's peak, and the largest tensors that are alive then."""
    found = []
    for name, device in simulated_devices(simulation).items():
        rows = [
            [(nbytes, "number"), (layer, "wide"), (kind, ""), (tensor, "wide"), (shape, "name")]
            for nbytes, layer, kind, tensor, shape in largest_rows(device)
        ]
        if rows:
            title = f"{name}: {format_bytes(int(device['peak']))} in {moment_text(device)}"
            table = _table(LARGEST_HEADERS, rows)
            found.append(f"<details><summary>{escape(title)}</summary>{table}</details>")
    if not found:
        return ""
    return "<h2>The largest tensors at each peak</h2>" + "".join(found)


def _compared(predicted: int, simulated: int | None) -> list[_Cell]:
    if not simulated:
        return [("-", "number"), ("", "number")]
    return [
        (format_bytes(simulated), "number"),
        (relative_difference(predicted, simulated), "number"),
    ]


def _transfers(plan: Plan) -> str:
    if not plan.transfers:
        return "<p>None: nothing crosses between stages.</p>"
    found, others = data_transfers(plan)
    rows: list[list[_Cell]] = [
        [
            (f"{t.source} → {t.target}", "name"),
            (t.value, "wide"),
            (format_bytes(t.nbytes), "number"),
        ]
        for t in found[:_TRANSFERS_SHOWN]
    ]
    total = format_bytes(sum(t.nbytes for t in found))
    hidden = len(found) - _TRANSFERS_SHOWN
    more = f" The largest {_TRANSFERS_SHOWN} are listed." if hidden > 0 else ""
    count = len(found)
    values = f"{count} value{'s' * (count != 1)}, {total} per micro-batch forward"
    text = f"<p>{values}{', ' * bool(others)}{others}.{more}</p>"
    return text + _table(["stages", "value", "bytes"], rows)


def _notes(plan: Plan) -> str:
    given = [f"checkpoint: {pattern}" for pattern in plan.checkpoint]
    given += [f"offload: {pattern}" for pattern in plan.offload]
    lines = [*plan.notes, *given, *filter(None, [host_text(plan.host)])]
    if not lines:
        return ""
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _nodes(plan: Plan) -> str:
    return "".join(
        f"<details><summary>stage {stage.index}: {len(stage.nodes)} nodes</summary>"
        f'<p class="nodes">{escape(", ".join(stage.nodes))}</p></details>'
        for stage in plan.stages
    )


def _table(headers: Sequence[str], rows: Iterable[Sequence[_Cell]], *, cards: bool = False) -> str:
    """An HTML table. With ``cards``, a narrow screen shows each row as a list of cells with headers."""
    listed = list(rows)
    right = {i for row in listed for i, (_, style) in enumerate(row) if style.startswith("number")}
    head = "".join(
        f'<th class="{"number" if i in right else ""}">{escape(text)}</th>'
        for i, text in enumerate(headers)
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="{style}" data-label="{escape(header)}">{escape(text)}</td>'
            for header, (text, style) in zip(headers, row, strict=True)
        )
        + "</tr>"
        for row in listed
    )
    return (
        f'<div class="scroll{" cards" * cards}"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )
