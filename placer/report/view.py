"""What a report shows of a plan, as plain data: every form of the report is written from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from placer.plan.step_spans import step_spans
from placer.plan.summary import describe_step, plan_facts
from placer.plan.types import DevicePeak, HostPeak, Plan, StageMemory, everything_fits
from placer.quantities import format_bytes, format_seconds
from placer.report.layers import compact_layers, stage_layers
from placer.report.verdict import host_text, memory_rule, verdict
from placer.tables import Cell, Table
from placer.timeline import Span, end_of, idle_share

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

_SIMULATED = ("peak", "workspaces", "reserved", "context", "starved")
_MOST_SPANS = 4000  # of a step; for more, there are no bars
_DEVICES_SHOWN = 3  # of a stage
_PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_LEFT_OUT = (  # columns of the table of devices, the least important first
    *("of budget", "kept free", "workspaces", "context", "difference", "stages"),
    *("budget", "reserved", "peak"),
)
KINDS = ("parameters", "gradients", "optimizer", "buffers", "saved", "boundary", "transient")


class Part(NamedTuple):
    """A part of a bar; ``start`` and ``length`` are shares of the longest bar, ``text`` says what it is."""

    kind: str
    start: float
    length: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar with a name before it and a figure after it, each with a smaller text that adds to it."""

    name: str
    detail: str = ""
    parts: Sequence[Part]
    figure: Cell
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a report shows of a plan, and of a simulation of it if there is one.

    ``headline`` says in a few words each what holds for the whole plan, and ``facts`` the same by name.
    ``memory`` has the bytes of every stage by kind, ``step`` what every device does in a step (empty if times
    are not known, or if that is too much to show). ``largest`` has the largest tensors at the peak of
    every device of the simulation, by a title.
    """

    verdict: Sequence[str]
    state: Literal["good", "slow", "bad"]
    headline: Sequence[str]
    facts: Mapping[str, str]
    stages: Table
    devices: Table
    largest: Mapping[str, Table]
    crossing: str  # a sentence on the transfers
    transfers: Table  # the largest first
    notes: Sequence[str]
    memory: Sequence[Bar]
    step: Sequence[Bar]


def view(plan: Plan, simulation: SimulationReport | Mapping[str, Any] | None = None) -> View:
    """What there is to show of ``plan``; ``simulation`` is a report, or what ``simulate --json`` prints.

    Raises ``KeyError``, ``TypeError`` or ``AttributeError`` if ``simulation`` is something else.
    """
    data = _as_json(simulation)
    judged = with_simulation(plan, simulation)
    spans = [] if plan.step_seconds is None else step_spans(plan)
    crossing, transfers = _transfers(plan)
    state: Literal["good", "slow", "bad"] = "slow" if judged.starved else "good"
    return View(
        verdict=verdict(judged),
        state=state if judged.fits else "bad",
        headline=[*plan_facts(plan), *([f"bubble {idle_share(spans):.0%}"] if spans else [])],
        facts=_facts(plan, spans),
        stages=_stages(judged),
        devices=_devices(plan, judged, data),
        largest=_largest(data),
        crossing=crossing,
        transfers=transfers,
        notes=[*plan.notes, *filter(None, (memory_rule(judged), host_text(judged.host)))],
        memory=_memory_bars(judged),
        step=_step_bars(plan, spans),
    )


def _as_json(simulation: SimulationReport | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The report as ``simulate --json`` prints it."""
    if simulation is None:
        return {"devices": {}}
    return simulation if isinstance(simulation, Mapping) else simulation.to_json()


def with_simulation(plan: Plan, simulation: SimulationReport | Mapping[str, Any] | None) -> Plan:
    """``plan`` with what devices and host need in the simulation, if there is one; see `view`."""
    data = _as_json(simulation)
    devices = []
    for device in plan.devices:
        found = data["devices"].get(device.device, {})
        devices.append(replace(device, **{k: found[k] for k in _SIMULATED if k in found}))
    host = HostPeak(**data["host"]) if "host" in data else plan.host
    fits = everything_fits(devices, host)
    return replace(plan, devices=tuple(devices), host=host, fits=fits)


def _facts(plan: Plan, spans: Sequence[Span]) -> dict[str, str]:
    """Name -> value of what holds for the whole plan."""
    optimizer = plan.optimizer
    if not isinstance(optimizer, str):
        optimizer = f"{optimizer['bytes_per_parameter']} bytes per parameter"
    facts = {
        "stages": str(len(plan.stages)),
        "replicas": str(plan.replicas),
        "micro-batches": str(plan.microbatches),
        "schedule": plan.schedule,
        "processes": "one per device" if plan.processes else "1",
        "objective": plan.objective,
        "precision": plan.precision,
        "optimizer": optimizer if plan.training else "none (inference)",
        "estimated step": describe_step(plan),
    }
    if spans:
        facts["bubble"] = f"{idle_share(spans):.0%}"
    return facts


def _stages(plan: Plan) -> Table:
    timed = plan.step_seconds is not None
    headers = ["stage", "layers", "device", "parameters", "saved", "peak", "budget"]
    headers += ["forward", "backward"] * timed
    fits = {device.device: device.fits for device in plan.devices}
    rows = []
    for stage, layers in zip(plan.stages, stage_layers(plan), strict=True):
        memory = stage.memory
        row: list[str | Cell] = [str(stage.index), compact_layers(layers), _some(stage.devices)]
        row += [format_bytes(memory.parameters), format_bytes(memory.saved)]
        row.append(Cell(format_bytes(memory.peak), "" if fits[stage.devices[0]] else "bad"))
        row.append(_known_bytes(stage.budget))
        if timed:
            seconds = (stage.forward_seconds, stage.backward_seconds)
            row += [format_seconds(each or 0.0) for each in seconds]
        rows.append(row)
    optional = ("backward", "forward", "saved", "parameters", "budget", "peak")
    return Table(headers=headers, rows=rows, words=("layers", "device"), optional=optional)


def _some(devices: Sequence[str]) -> str:
    if len(devices) <= _DEVICES_SHOWN:
        return ", ".join(devices)
    return f"{devices[0]} … {devices[-1]} ({len(devices)} devices)"


def _known_bytes(nbytes: int | None) -> str:
    return "not known" if nbytes is None else format_bytes(nbytes)


def _devices(plan: Plan, judged: Plan, data: Mapping[str, Any]) -> Table:
    """What every device needs: as predicted, and in the simulation, if there is one."""
    compared = ("simulated", "difference") if data["devices"] else ()
    known = any(device.reserved is not None for device in judged.devices)
    taken = ("workspaces", "reserved", "context") if known else ()
    figures = ("peak", *compared, *taken, "kept free", "budget", "headroom", "of budget")
    rows = []
    for predicted, device in zip(plan.devices, judged.devices, strict=True):
        cells = _needs(device)
        cells["peak"] = format_bytes(predicted.peak)
        if device.device in data["devices"]:
            cells["simulated"] = format_bytes(device.peak)
            cells["difference"] = relative_difference(predicted.peak, device.peak)
        stages = [str(s.index) for s in plan.stages if device.device in s.devices]
        row = (cells.get(header, "-") for header in figures)
        rows.append([device.device, ", ".join(stages), *row])
    return Table(
        headers=("device", "stages", *figures),
        rows=rows,
        names=("device",),
        words=("stages",),
        optional=_LEFT_OUT,
    )


def _needs(device: DevicePeak) -> dict[str, str | Cell]:
    """Header -> what is known of it for the device."""
    cells: dict[str, str | Cell] = {"budget": _known_bytes(device.budget)}
    if device.reserved is not None:
        cells["workspaces"] = format_bytes(device.workspaces)
        cells["reserved"] = format_bytes(device.reserved)
        cells["context"] = format_bytes(device.context)
    if device.headroom is not None and device.share is not None:
        state: Literal["good", "bad"] = "good" if device.fits else "bad"
        cells["kept free"] = format_bytes(device.reserve)
        cells["headroom"] = Cell(format_bytes(device.headroom), state)
        cells["of budget"] = Cell(f"{device.share:.0%}", state)
    return cells


def relative_difference(predicted: int, simulated: int) -> str:
    """The error of the prediction relative to the simulated bytes, as a percentage.

    >>> relative_difference(99, 100), relative_difference(99999, 100000)
    ('-1.0%', '0.0%')
    """
    if not simulated:
        return ""
    tenths = round(1000 * (predicted - simulated) / simulated)
    return f"{tenths / 10:+.1f}%" if tenths else "0.0%"


def _largest(data: Mapping[str, Any]) -> dict[str, Table]:
    """A title -> the largest tensors that are alive at the peak of a device in the simulation."""
    found = {}
    for name, device in data["devices"].items():
        rows = [
            (
                format_bytes(tensor["bytes"]),
                tensor["layer"] or "the model",
                tensor["kind"],
                tensor["name"].rpartition(".")[2],
                "x".join(map(str, tensor["shape"])) or "scalar",
            )
            for tensor in device.get("largest", ())
        ]
        if not rows:
            continue
        where = device["layer"] or device["node"]
        moment = f"{device['phase']} of {where}" if where else device["phase"]
        title = (
            f"{name} at its peak, {format_bytes(device['peak'])} in {moment}: the largest tensors"
        )
        words = ("layer", "made in", "name", "shape")
        found[title] = Table(
            headers=("bytes", *words), rows=rows, words=words, optional=("name", "made in", "shape")
        )
    return found


def _transfers(plan: Plan) -> tuple[str, Table]:
    """A sentence on all transfers, and the table of those of tensors.

    The others are values without bytes, such as sizes of a tensor that a later stage reads.
    """
    found = [transfer for transfer in plan.transfers if transfer.nbytes]
    found.sort(key=lambda t: (-t.nbytes, t.source, t.target, t.value))
    rows = [(f"{t.source} → {t.target}", format_bytes(t.nbytes), t.value) for t in found]
    headers = ("stages", "bytes", "value")
    table = Table(headers=headers, rows=rows, names=("stages",), words=("value",))
    total = format_bytes(sum(transfer.nbytes for transfer in found))
    others = len(plan.transfers) - len(found)
    text = f"transfers: {len(found)}, {total} per micro-batch forward"
    if others:
        text += f", and {others} without tensors, such as sizes"
    return text if plan.transfers else "transfers: nothing crosses between stages", table


def _memory_bars(plan: Plan) -> list[Bar]:
    """A bar per stage: its bytes by kind, what of the budget is not for tensors, and the budget."""
    ends = [stage.memory.peak for stage in plan.stages]
    longest = max(1, *ends, *(stage.budget or 0 for stage in plan.stages))
    devices = {device.device: device for device in plan.devices}
    bars = []
    for stage in plan.stages:
        device, budget = devices[stage.devices[0]], stage.budget
        parts, left = [], 0
        for kind, nbytes in memory_parts(stage.memory).items():
            if nbytes:
                text = f"{kind}: {format_bytes(nbytes)}"
                parts.append(Part(kind, left / longest, nbytes / longest, text))
                left += nbytes
        if budget is not None:
            free = max(0, budget - device.context - device.reserve)
            text = f"context and reserve: {format_bytes(budget - free)}"
            parts.append(Part("reserve", free / longest, (budget - free) / longest, text))
            parts.append(Part("budget", budget / longest, 0.0, f"budget: {format_bytes(budget)}"))
        bars.append(
            Bar(
                name=f"stage {stage.index}",
                detail=_some(stage.devices),
                parts=parts,
                figure=Cell(format_bytes(stage.memory.peak), "" if device.fits else "bad"),
                limit="" if budget is None else f"of {format_bytes(budget)}",
            )
        )
    return bars


def memory_parts(memory: StageMemory) -> dict[str, int]:
    """Bytes by kind that add up to the peak, the longest-lived kinds first.

    If the kinds add up to more than the peak, because not all of them are alive at that moment, the
    last ones are reduced.

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


def _step_bars(plan: Plan, spans: Sequence[Span]) -> list[Bar]:
    """A bar per device with its computations over one step, without transfers that overlap with them."""
    end = end_of(spans)
    if not end or len(spans) > _MOST_SPANS:
        return []
    on: dict[str, list[Span]] = {device.device: [] for device in plan.devices}
    for span in spans:
        if span.end > span.start and on.keys() >= set(span.on):  # else it is on a link
            for name in span.on:
                on[name].append(span)
    bars = []
    for name, found in on.items():
        busy = sum(span.end - span.start for span in found if span.kind != "transfer") / end
        parts = [_step_part(span, end) for span in found]
        bars.append(Bar(name=name, parts=parts, figure=Cell(f"{busy:.0%} busy")))
    return bars


def _step_part(span: Span, end: float) -> Part:
    size = f", {format_bytes(span.nbytes)}" if span.nbytes else ""
    seconds = span.end - span.start
    text = f"{span.name}: {format_seconds(seconds)}{size}"
    return Part(span_style(span), span.start / end, seconds / end, text)


def span_style(span: Span) -> str:
    """What the span is to a reader: forward, backward, transfer or optimizer."""
    if span.kind != "compute":
        return span.kind
    return _PASSES[span.name.lstrip("0123456789")[0]]
