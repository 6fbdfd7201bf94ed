"""Show a plan as one self-contained HTML page; its template, style and script are in ``page/``."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from placer.errors import PlanError, Tried, some_names
from placer.files import writing
from placer.plan.explain import (
    describe_change,
    describe_optimality,
    in_unit,
    place_of,
    why_no_other,
)
from placer.plan.types import Plan, Transfer
from placer.quantities import format_bytes, format_seconds
from placer.report.layers import compact_layers
from placer.report.text import crossing
from placer.report.view import DeviceGroup, View, span_style, view
from placer.timeline import MEMORY_KINDS, Span, StepPosition, memory_kind
from placer.versions import found_release

if TYPE_CHECKING:
    from placer.simulation import SimulationReport
    from placer.simulation.over_time import MemoryPoint
    from placer.spec import PlacementSpec

# What a page shows, so that it has at most 400 kB.
_GROUPS_SHOWN = 16
_SPANS_DRAWN = 1500
_POINTS_DRAWN = 1600
_STAGES_SHOWN = 64
_SKIP_LANES = 4
_SKIP_WIDTH = 76  # pixels of a lane, with its label
_LAYERS_TOLD = 4  # of a point of a curve
_PARTS = {
    "weights": "weights and buffers",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gradients": "gradients",
    "received": "inputs, received",
    "temporary": "temporary",
    "workspaces": "workspaces of kernels",
    "rounding": "allocator's rounding",
    "context": "context",
    "free": "kept free",
}
_VERSIONS = ("placer", "torch", "python")
_LANES = {
    "forward": "forward",
    "backward": "backward",
    "transfer": "transfer",
    "sum": "gradients or weights sent between replicas or shards",
    "optimizer": "optimizer",
}


def write_html(
    plan: Plan,
    path: str | Path,
    *,
    simulation: SimulationReport | Mapping[str, Any] | None = None,
    remedies: Sequence[Tried] = (),
) -> None:
    """Write the page of ``plan`` to ``path``; see `page`. Raises ``PlanError`` when that is not possible."""
    text = page(plan, simulation=simulation, remedies=remedies)
    with writing(Path(path), PlanError):
        Path(path).write_text(text, encoding="utf-8")


def page(
    plan: Plan,
    *,
    simulation: SimulationReport | Mapping[str, Any] | None = None,
    remedies: Sequence[Tried] = (),
) -> str:
    """The page of ``plan`` as HTML text, of at most 400 kB; the same plan gives the same text.

    ``simulation`` is a report, or the JSON that ``placer simulate --json`` prints; only the former has the
    memory over time. ``remedies`` are the changes that were tried because the plan does not fit.
    """
    shown = view(plan, simulation, remedies=remedies)
    return _environment(shown).get_template("page.html.j2").render(_variables(shown))


def plan_frame(plan: Plan) -> str:
    """The page of ``plan`` in a frame, for notebooks."""
    return (
        '<iframe sandbox="allow-scripts" style="width:100%;height:640px;border:1px solid #8884" '
        f'srcdoc="{escape(page(plan))}"></iframe>'
    )


def spec_table(spec: PlacementSpec) -> str:
    """The fields of ``spec`` that are not defaults, as HTML, for notebooks."""
    fields = json.loads(spec.to_json())
    return _templates().get_template("spec.html.j2").render(fields=fields, json=json.dumps)


def _variables(shown: View) -> dict[str, Any]:
    plan, groups = shown.plan, shown.devices
    seen = _tightest(groups)
    names = {group.name for group in seen}
    skips = [skip for skip in shown.skips if skip.lane < _SKIP_LANES]
    limits = [max(g.needs.needed, g.needs.budget or 0) for g in groups]
    part_kinds = {kind for g in groups for kind, nbytes in g.parts.items() if nbytes}
    part_kinds |= {"free"} if any(g.needs.reserve for g in groups) else set()
    drawn = _drawn(seen)
    next_edges = defaultdict[int, list[Transfer]](list)
    for transfer in shown.transfers:
        if transfer.target == transfer.source + 1:
            next_edges[transfer.source].append(transfer)
    return {
        "v": shown,
        "plan": plan,
        "timed": plan.step_seconds is not None,
        "words": _PARTS,
        "parts_legend": [(kind, what) for kind, what in _PARTS.items() if kind in part_kinds],
        "lanes_legend": [(kind, what) for kind, what in _LANES.items() if kind in drawn],
        "reserving": any(group.needs.needed != group.needs.peak for group in groups),
        "grouped": len(groups) < len(plan.devices),
        "scale": 1.02 * max(1, *limits),
        "shown": seen,
        "rest": [group for group in groups if group.name not in names],
        "drawn": drawn,
        "ticks": list(_ticks(shown.end)),
        "curves": list(_curves(shown, seen)),
        "largest": any(group.at_peak for group in seen),
        "optimality": describe_optimality(plan.optimality),
        "no_other": why_no_other(plan),
        "crossing": crossing(shown),
        "skips": skips,
        "gutter": _SKIP_WIDTH * (1 + max((skip.lane for skip in skips), default=-1)),
        "next_edges": next_edges,
        "most_stages": _STAGES_SHOWN,
        "style": _file("uplot/uPlot.min.css") + _file("page.css"),
        "script": _script(curves=any(group.memory for group in seen)),
        "versions": " · ".join(f"{name} {found_release(name)}" for name in _VERSIONS),
    }


def _tightest(groups: Sequence[DeviceGroup]) -> list[DeviceGroup]:
    """The groups with the least headroom, or else the greatest needs, in the plan's order."""

    def key(group: DeviceGroup) -> tuple[float, int]:
        headroom = group.needs.headroom
        return math.inf if headroom is None else headroom, -group.needs.needed

    kept = {group.name for group in sorted(groups, key=key)[:_GROUPS_SHOWN]}
    return [group for group in groups if group.name in kept]


def _drawn(groups: Sequence[DeviceGroup]) -> set[str]:
    """Which styles of spans are drawn: without transfers, or none at all, if there are too many."""
    found = [span_style(span) for group in groups for span in group.lane.spans]
    if len(found) > _SPANS_DRAWN:
        found = [style for style in found if style != "transfer"]
    return set(found) if len(found) <= _SPANS_DRAWN else set()


def _ticks(end: float) -> Iterator[float]:
    """Round moments of a step, seven at most besides 0."""
    if end:
        steps = (n * 10.0**p for p in range(-9, 9) for n in (1, 2, 2.5, 5))
        step = next(step for step in steps if end / step <= 7)
        yield from (number * step for number in range(int(end / step) + 1))


def _curves(shown: View, groups: Sequence[DeviceGroup]) -> Iterator[dict[str, Any]]:
    """What the script draws, with names by their number in ``names``."""
    found = [group for group in groups if group.memory]
    for group in found:
        points = _thinned(group.memory, _POINTS_DRAWN // len(found))
        names: dict[str, int] = {}
        peak = max(points, key=lambda point: point.nbytes)

        def number(name: str, names: dict[str, int] = names) -> int:
            return names.setdefault(name, len(names))

        yield {
            "name": group.name,
            "timed": shown.plan.step_seconds is not None,
            "end": shown.end,
            "room": group.needs.room,
            "peak": {"at": peak.seconds, "bytes": peak.nbytes},
            "x": [float(f"{point.seconds:.6g}") for point in points],
            "kinds": {
                kind: nbytes
                for kind in MEMORY_KINDS
                if any(nbytes := [point.kinds[kind] for point in points])
            },
            "running": [[number(p.where.phase), number(p.where.layer)] for p in points],
            "layers": [
                [
                    [number(layer), number(_PARTS[kind]), nbytes]
                    for layer, kind, nbytes in p.layers[:_LAYERS_TOLD]
                ]
                for p in points
            ],
            "names": list(names),
        }


def _thinned(points: Sequence[MemoryPoint], most: int) -> list[MemoryPoint]:
    """At most ``most`` points, and the last one: the highest of each run of neighbours."""
    run = -(-len(points) // most)
    parts = (points[start : start + run] for start in range(0, len(points) - 1, run))
    return [*(max(part, key=lambda point: point.nbytes) for part in parts), points[-1]]


def _moment(where: StepPosition) -> str:
    return f"{where.phase or 'the step'} of {where.layer}" if where.layer else where.phase or "?"


def _at_peak(group: DeviceGroup) -> str:
    if group.peak is not None:
        return _moment(group.peak.where)
    return _moment(StepPosition(phase=group.at_peak["phase"], layer=group.at_peak["layer"]))


def _alive(group: DeviceGroup) -> Sequence[tuple[str, str, int]]:
    """The largest tensors at the peak, by layer where that is known: layer, kind, bytes."""
    if group.peak is not None:
        return list(group.peak.layers)
    blocks = group.at_peak["largest"]
    return [(block["layer"], memory_kind(block["kind"]), block["bytes"]) for block in blocks]


def _describe_span(span: Span) -> str:
    size = f", {format_bytes(span.nbytes)}" if span.nbytes else ""
    seconds = format_seconds(span.end - span.start)
    return f"{span.name}: {seconds}{size}, from {format_seconds(span.start)}"


def _sentence(text: str) -> str:
    """``text`` with a capital, unless it begins with a name in code, as in "placed.step()"."""
    return text if "." in text.partition(" ")[0][:-1] else text[:1].upper() + text[1:]


@functools.cache
def _file(name: str) -> str:
    return resources.files("placer.report").joinpath("page", name).read_text(encoding="utf-8")


def _script(*, curves: bool) -> str:
    """The script, with the library and its licence only if there are curves to draw."""
    library = f"/*! {_file('uplot/LICENSE')}*/\n{_file('uplot/uPlot.iife.min.js')}\n"
    return library * curves + _file("page.js")


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("placer.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _environment(shown: View) -> jinja2.Environment:
    """The templates with filters for one view."""
    plan, end = shown.plan, shown.end
    found = _templates().overlay()
    found.filters = {
        **found.filters,
        "bytes": format_bytes,
        "seconds": format_seconds,
        "percent": lambda share: f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%",
        "tick": lambda at: (f"{at:.4g} s" if end >= 1 else f"{at * 1e3:.4g} ms") if at else "0",
        "load": lambda value: in_unit(value, plan.optimality.criterion),
        "change": lambda value: describe_change(value, plan.optimality.value),
        "place": lambda node: place_of(plan, node),
        "compact": compact_layers,
        "some": some_names,
        "style": span_style,
        "describe": _describe_span,
        "sentence": _sentence,
        "moment": _moment,
        "at_peak": _at_peak,
        "alive": _alive,
        # A name may be "</script>".
        "json": lambda value: json.dumps(value, separators=(",", ":")).replace("</", "<\\/"),
    }
    return found
