"""Show a plan, a simulation of it, or which sizes fit, as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from placer.errors import some_names
from placer.plan.types import DevicePeak, Plan
from placer.quantities import BYTES, SECONDS, format_bytes
from placer.report.layers import compact_layers
from placer.report.view import DeviceGroup, View, relative_difference, view
from placer.search.largest import SizeTried
from placer.tables import Cell, Table

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

_TRANSFERS_SHOWN = 6
_STYLES = {"good": "bold green", "slow": "bold yellow", "bad": "bold red"}
_LEFT_OUT = (  # columns of the table of devices, the least important first
    *("used", "kept free", "workspaces", "context", "difference", "stages"),
    *("budget", "reserved", "peak"),
)


def plan_table(plan: Plan) -> RenderableType:
    """``plan`` for ``rich``: stages, devices, transfers, notes, and whether it fits."""
    return Group(*_plan(view(plan)))


def simulation_table(plan: Plan, report: SimulationReport) -> RenderableType:
    """What devices need in a simulation of ``plan``, their largest tensors, and whether it fits."""
    return Group(*_simulation(view(plan, report)))


def _plan(shown: View) -> Iterator[RenderableType]:
    plan = shown.plan
    yield _Headline(shown.headline)
    for table in (_stages(shown), _devices(shown)):
        yield from ("", table)
    yield Text(f"\n{crossing(shown)}")
    if found := shown.transfers:
        rows = [
            (
                f"{t.source} → {t.target}",
                t.nbytes,
                t.value,
                plan.node_layers.get(t.value) or "the model",
            )
            for t in found[:_TRANSFERS_SHOWN]
        ]
        yield Table(
            headers=("stages", "sent", "value", "layer"),
            rows=rows,
            names=("stages",),
            words=("value", "layer"),
            optional=("layer",),
            units={"sent": BYTES},
        )
        if len(found) > _TRANSFERS_SHOWN:
            yield f"… and {len(found) - _TRANSFERS_SHOWN} smaller"
        yield ""
    if plan.alternatives:
        yield Text(
            "\n" * (not found)
            + f"chosen: {plan.strategy}; the best of every other kind of strategy:"
        )
        yield _alternatives(plan)
        yield ""
    yield from _verdict(shown)


class _Headline:
    """Facts in a line, or in several, each of them in one line."""

    def __init__(self, facts: Sequence[str]) -> None:
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = ""
        for fact in self._facts:
            longer = f"{line} · {fact}" if line else fact
            if line and cell_len(longer) > options.max_width:
                yield Text(line, style="bold")
                longer = fact
            line = longer
        yield Text(line, style="bold")


def _simulation(shown: View) -> Iterator[RenderableType]:
    yield _devices(shown)
    for group in shown.devices:
        if group.at_peak.get("largest"):
            yield Text(f"\n{_at_peak(group)}")
            yield _largest(group.at_peak["largest"])
    yield ""
    yield from _verdict(shown)


def _verdict(shown: View) -> Iterator[RenderableType]:
    """The notes, and whether it fits."""
    for note in shown.notes:
        yield Text(f"note: {note}", style="dim")
    for line in shown.verdict:
        yield Text(line, style=_STYLES[shown.state])


def _stages(shown: View) -> Table:
    plan = shown.plan
    timed = plan.step_seconds is not None
    headers = ["stage", "layers", "device", "parameters", "saved", "peak", "budget"]
    headers += ["forward", "backward"] * timed
    fits = {device.device: device.fits for device in plan.devices}
    rows = []
    for stage, layers in zip(plan.stages, shown.layers, strict=True):
        memory = stage.memory
        rows.append(
            [
                str(stage.index),
                compact_layers(layers),
                some_names(stage.devices),
                memory.parameters,
                memory.saved,
                Cell(memory.peak, "" if fits[stage.devices[0]] else "bad"),
                _known(stage.budget),
                *(stage.forward_seconds or 0.0, stage.backward_seconds or 0.0)[: 2 * timed],
            ]
        )
    return Table(
        headers=headers,
        rows=rows,
        names=("device",),
        words=("layers",),
        optional=("backward", "forward", "saved", "parameters", "budget", "peak"),
        units=dict.fromkeys(headers[3:7], BYTES) | dict.fromkeys(headers[7:], SECONDS),
    )


def _alternatives(plan: Plan) -> Table:
    timed = plan.step_seconds is not None
    headers = ("strategy", "devices", *["step"] * timed, "headroom", "why not")
    rows = [
        [
            each.strategy,
            each.devices,
            *(["-" if each.step_seconds is None else each.step_seconds] * timed),
            Cell("-" if each.headroom is None else each.headroom, "" if each.fits else "bad"),
            each.reason,
        ]
        for each in plan.alternatives
    ]
    return Table(
        headers=headers,
        rows=rows,
        words=("strategy", "why not"),
        optional=("devices", "headroom"),
        units={"step": SECONDS, "headroom": BYTES},
    )


def _known(nbytes: int | None) -> str | int:
    return "not known" if nbytes is None else nbytes


def _devices(shown: View) -> Table:
    """What the devices need: as predicted, and in the simulation, if there is one."""
    compared = ("simulated", "difference") if shown.simulated else ()
    known = any(group.needs.reserved is not None for group in shown.devices)
    taken = ("workspaces", "reserved", "context") if known else ()
    figures = ("peak", *compared, *taken, "kept free", "budget", "headroom", "used")
    rows = []
    for group in shown.devices:
        cells = _needs(group.needs)
        cells["peak"] = group.predicted
        if shown.simulated:
            cells["simulated"] = group.needs.peak
            cells["difference"] = relative_difference(group.predicted, group.needs.peak)
        row = (cells.get(header, "-") for header in figures)
        rows.append([some_names(group.devices), ", ".join(map(str, group.stages)), *row])
    return Table(
        headers=("device", "stages", *figures),
        rows=rows,
        names=("device",),
        words=("stages",),
        optional=_LEFT_OUT,
        units=dict.fromkeys(set(figures) - {"difference", "used"}, BYTES),
    )


def _needs(device: DevicePeak) -> dict[str, str | float | Cell]:
    """Header -> what is known of it for the device."""
    cells: dict[str, str | float | Cell] = {"budget": _known(device.budget)}
    if device.reserved is not None:
        cells["workspaces"] = device.workspaces
        cells["reserved"] = device.reserved
        cells["context"] = device.context
    if device.headroom is not None and device.share is not None:
        state: Literal["good", "bad"] = "good" if device.fits else "bad"
        cells["kept free"] = device.reserve
        cells["headroom"] = Cell(device.headroom, state)
        cells["used"] = Cell(f"{device.share:.0%}", state)
    return cells


def _at_peak(group: DeviceGroup) -> str:
    """Which moment the peak is at."""
    phase, where = group.at_peak["phase"], group.at_peak["layer"] or group.at_peak["node"]
    moment = f"{phase} of {where}" if where else phase
    peak = format_bytes(group.needs.peak)
    return f"{group.name} at its peak, {peak} in {moment}: the largest tensors"


def _largest(tensors: Sequence[Mapping[str, Any]]) -> Table:
    """The largest tensors that are alive at the peak of a device in the simulation."""
    rows = [
        (
            tensor["bytes"],
            tensor["layer"] or "the model",
            tensor["kind"],
            tensor["name"].removeprefix(f"{tensor['layer']}."),
            "x".join(map(str, tensor["shape"])) or "scalar",
        )
        for tensor in tensors
    ]
    words = ("layer", "made in", "name", "shape")
    return Table(
        headers=("size", *words),
        rows=rows,
        words=words,
        optional=("name", "made in", "shape"),
        units={"size": BYTES},
    )


def crossing(shown: View) -> str:
    """A sentence on all transfers to other devices; some are of values without bytes, such as sizes."""
    total = format_bytes(sum(transfer.nbytes for transfer in shown.transfers))
    others = sum(not transfer.nbytes for transfer in shown.plan.transfers)
    if not shown.transfers and not others:
        return "transfers: nothing crosses between stages"
    text = f"transfers: {len(shown.transfers)}, {total} per micro-batch forward"
    return f"{text}, and {others} without tensors, such as sizes" if others else text


def sizes_table(rows: Iterable[tuple[str, SizeTried]], header: str) -> Table:
    """A row for every size that was tried; a size that does not fit has a negative headroom."""
    cells = []
    for size, tried in rows:
        plan = tried.plan
        seconds = None if plan is None or not tried.fits else plan.step_seconds
        headroom = None if plan is None else plan.tightest.headroom
        cells.append(
            [
                size,
                tried.strategy,
                "-" if seconds is None else seconds,
                Cell("-" if headroom is None else headroom, "good" if tried.fits else "bad"),
            ]
        )
    return Table(
        headers=(header, "strategy", "step", "headroom"),
        rows=cells,
        names=(header,),
        words=("strategy",),
        units={"step": SECONDS, "headroom": BYTES},
    )
