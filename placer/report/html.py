"""Show a plan as one self-contained HTML page, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.errors import PlanError
from placer.files import writing
from placer.plan.types import Plan
from placer.report.style import STYLE
from placer.report.view import Bar, View, view
from placer.tables import Cell, Table

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

_TRANSFERS_SHOWN = 200
_MEANING = {  # kind of a part of a bar -> its explanation
    "forward": "forward of a micro-batch",
    "backward": "backward of a micro-batch",
    "transfer": "values that are copied to another stage",
    "parameters": "weights of the stage",
    "gradients": "one per weight",
    "optimizer": "state of the optimizer, or its step",
    "buffers": "such as running statistics",
    "saved": "activations kept for backward, of all micro-batches in flight",
    "boundary": "received from another stage",
    "transient": "live only while an operation runs",
    "reserve": "context and reserve, which are not for tensors",
    "budget": "memory of the device",
}


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
    shown = view(plan, simulation)
    sections = [
        "<h1>Placement plan</h1>",
        f'<p class="dim">{escape(of)}</p>' if of else "",
        *(f'<p class="verdict {shown.state}">{escape(line)}</p>' for line in shown.verdict),
        _facts(shown.facts),
        _bars("Memory of each stage", shown.memory, "k"),
        "<h2>Stages</h2>" if plan.step_seconds is None else "<h2>Stages, with estimated times</h2>",
        _table(shown.stages, cards=True),
        _bars("A step in time, estimated", shown.step, "t"),
        "<h2>Devices</h2>",
        _table(shown.devices, cards=True),
        "<h2>The largest tensors at each peak</h2>" if shown.largest else "",
        *(_folded(title, _table(tensors)) for title, tensors in shown.largest.items()),
        "<h2>Transfers</h2>",
        *_transfers(shown),
        _notes(plan, shown),
        "<h2>Nodes</h2>",
        *(
            _folded(
                f"stage {stage.index}: {len(stage.nodes)} nodes",
                f'<p class="nodes">{escape(", ".join(stage.nodes))}</p>',
            )
            for stage in plan.stages
        ),
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


def _facts(facts: Mapping[str, str]) -> str:
    items = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _bars(title: str, bars: Sequence[Bar], prefix: str) -> str:
    """A row per bar below a legend of all kinds of parts; ``prefix`` is that of the kinds' CSS classes."""
    if not bars:
        return ""
    kinds = {part.kind for bar in bars for part in bar.parts}
    legend = "".join(
        f'<span title="{meaning}"><i class="{prefix}-{kind}"></i>{kind}</span>'
        for kind, meaning in _MEANING.items()
        if kind in kinds
    )
    rows = "".join(_bar(bar, prefix) for bar in bars)
    return (
        f'<h2>{title}</h2><p class="legend">{legend}</p>'
        f'<div class="bars" role="img" aria-label="{title}">{rows}</div>'
    )


def _bar(bar: Bar, prefix: str) -> str:
    parts = "".join(
        f'<i class="{prefix}-{part.kind}" title="{escape(part.text)}" '
        f'style="left:{100 * part.start:.3f}%;width:{100 * part.length:.3f}%"></i>'
        for part in bar.parts
    )
    return (
        f'<div class="row"><span><b>{escape(bar.name)}</b> <small>{escape(bar.detail)}</small></span>'
        f'<div class="bar">{parts}</div>'
        f'<span><b class="{bar.figure.state}">{bar.figure.text}</b> <small>{bar.limit}</small></span></div>'
    )


def _transfers(shown: View) -> Iterable[str]:
    yield f"<p>{shown.crossing}</p>"
    if rows := shown.transfers.rows:
        yield _table(replace(shown.transfers, rows=rows[:_TRANSFERS_SHOWN]))
        if len(rows) > _TRANSFERS_SHOWN:
            yield f"<p>… and {len(rows) - _TRANSFERS_SHOWN} smaller</p>"


def _notes(plan: Plan, shown: View) -> str:
    given = [f"checkpoint: {layer}" for layer in plan.checkpoint]
    given += [f"offload: {layer}" for layer in plan.offload]
    lines = "".join(f"<li>{escape(line)}</li>" for line in (*shown.notes, *given))
    return f"<h2>Notes</h2><ul>{lines}</ul>" if lines else ""


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(table: Table, *, cards: bool = False) -> str:
    """An HTML table. With ``cards``, a narrow screen shows each row as a list of cells with headers."""
    columns = [(header, table.kind(header)) for header in table.headers]
    head = "".join(f'<th class="{kind}">{escape(header)}</th>' for header, kind in columns)
    body = "".join("<tr>" + "".join(map(_cell, row, columns)) + "</tr>\n" for row in table.rows)
    return (
        f'<div class="scroll{" cards" * cards}"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str | Cell, column: tuple[str, str]) -> str:
    header, kind = column
    text, state = cell if isinstance(cell, Cell) else (cell, "")
    return f'<td class="{kind} {state}" data-label="{escape(header)}">{escape(text)}</td>'
