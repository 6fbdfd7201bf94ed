"""Show a plan as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from placer.plan.summary import describe_step
from placer.plan.types import DevicePeak, Plan, StagePlan
from placer.quantities import format_bytes, format_count
from placer.report.figures import (
    bubble,
    data_transfers,
    host_text,
    memory_rule,
    needs_device_table,
    shows_reserved,
    simulated_peaks,
    verdict,
)
from placer.report.layers import compact_layers, stage_layers
from placer.tables import FittedTable

if TYPE_CHECKING:
    from placer.simulation import SimulationReport

_TRANSFERS_SHOWN = 6
_DEVICES_SHOWN = 3
_BAR = 12  # characters
_SHARE = "of budget"  # the header of the bars
_PADDING = (0, 1, 0, 0)


def plan_table(
    plan: Plan, *, simulation: SimulationReport | Mapping[str, Any] | None = None
) -> RenderableType:
    """``plan`` for ``rich``: stages, devices, transfers, notes, and whether it fits; for 80 columns or more.

    With a ``simulation`` (a report, or its JSON), simulated peaks are shown next to predicted ones.
    """
    parts: list[RenderableType] = [_headline(plan), "", _stages(plan), ""]
    if needs_device_table(plan) or simulation is not None:
        parts += [_devices(plan, simulated_peaks(simulation)), ""]
    if rule := memory_rule(plan):
        parts.append(Text(rule, style="dim"))
    if waits := host_text(plan.host):
        parts.append(Text(waits, style="dim"))
    if plan.transfers:
        parts.append(_transfers(plan))
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    parts += [Text(line, style=verdict_style(plan)) for line in verdict(plan)]
    return Group(*parts)


def verdict_style(plan: Plan) -> str:
    """The style of the plan's verdict in a terminal."""
    if not plan.fits:
        return "bold red"
    return "bold yellow" if plan.starved else "bold green"


def _headline(plan: Plan) -> Text:
    optimizer = plan.optimizer
    if not isinstance(optimizer, str):
        optimizer = f"{optimizer['bytes_per_parameter']} bytes per parameter"
    step = f"training with {optimizer}" if plan.training else "inference"
    words = [
        format_count(len(plan.stages), "stage"),
        format_count(plan.replicas, "replica"),
        format_count(plan.microbatches, "micro-batch", "micro-batches") + f" ({plan.schedule})",
        f"{plan.precision}, {step}",
        *["one process per device"] * plan.processes,
    ]
    times = [f"estimated step {describe_step(plan)}"]
    if (idle := bubble(plan)) is not None:
        times.append(f"bubble {idle:.0%}")
    return Text(" · ".join(words) + "\n" + " · ".join(times), style="bold")


def _stages(plan: Plan) -> FittedTable:
    table = FittedTable(optional=("saved", "parameters", "budget", "peak"), padding=_PADDING)
    table.add_column("stage", justify="right")
    table.add_column("layers", wraps=True, ratio=1)
    table.add_column("device")
    for header in ("parameters", "saved", "peak", "budget"):
        table.add_column(header, justify="right")
    fits = {device.device: device.fits for device in plan.devices}
    for stage, layers in zip(plan.stages, stage_layers(plan), strict=True):
        over = not fits[stage.devices[0]]
        table.add_row(
            str(stage.index),
            compact_layers(layers, most=2),
            _devices_of(stage),
            format_bytes(stage.memory.parameters),
            format_bytes(stage.memory.saved),
            Text(format_bytes(stage.memory.peak), style="bold red" if over else ""),
            _budget(stage.budget),
        )
    return table


def _devices(plan: Plan, simulated: Mapping[str, int]) -> FittedTable:
    reserved = shows_reserved(plan)
    compared = ["simulated"] if simulated else []
    taken = ["workspaces", "reserved", "context"] if reserved else []
    left_out = (_SHARE, "workspaces", "context", "stages", "budget", "reserved", "peak")
    table = FittedTable(optional=left_out, padding=_PADDING)
    for header in ("device", "stages"):
        table.add_column(header)
    for header in ("peak", *compared, *taken, "budget", "headroom"):
        table.add_column(header, justify="right")
    table.add_column(_SHARE)
    for device in plan.devices:
        stages = [str(s.index) for s in plan.stages if device.device in s.devices]
        cells: list[RenderableType] = [device.device, ", ".join(stages), format_bytes(device.peak)]
        if simulated:
            peak = simulated.get(device.device)
            cells.append("-" if peak is None else format_bytes(peak))
        if reserved:
            of_allocator = device.reserved is not None
            cells.append(format_bytes(device.workspaces) if of_allocator else "-")
            cells.append(format_bytes(device.reserved or 0) if of_allocator else "-")
            cells.append(format_bytes(device.context) if device.context else "-")
        cells += [_budget(device.budget), _headroom(device), _bar(device)]
        table.add_row(*cells)
    return table


def _transfers(plan: Plan) -> Text:
    """The number and total bytes of the transfers, and the largest ones."""
    largest, others = data_transfers(plan)
    total = sum(transfer.nbytes for transfer in largest)
    count = format_count(len(largest), "transfer")
    lines = [f"{count}, {format_bytes(total)} per micro-batch forward:"]
    for transfer in largest[:_TRANSFERS_SHOWN]:
        lines.append(
            f"  {transfer.source} → {transfer.target}  {format_bytes(transfer.nbytes):>10}  "
            f"{transfer.value}"
        )
    if len(largest) > _TRANSFERS_SHOWN:
        lines.append(f"  … and {len(largest) - _TRANSFERS_SHOWN} smaller")
    if others:
        lines.append(f"  {others}")
    return Text("\n".join(lines))


def _devices_of(stage: StagePlan) -> str:
    if len(stage.devices) <= _DEVICES_SHOWN:
        return "\n".join(stage.devices)
    return "\n".join((stage.devices[0], "…", stage.devices[-1]))


def _budget(budget: int | None) -> str:
    return "not known" if budget is None else format_bytes(budget)


def _headroom(device: DevicePeak) -> Text:
    if device.headroom is None:
        return Text("")
    return Text(format_bytes(device.headroom), style="green" if device.fits else "bold red")


def _bar(device: DevicePeak) -> Text:
    """A bar of the share of the budget that is needed, including the reserve."""
    share = device.share
    if share is None:
        return Text("")
    full = min(_BAR, round(share * _BAR))
    style = "green" if device.fits else "bold red"
    return Text("█" * full + "░" * (_BAR - full) + f" {share:.0%}", style=style)
