"""When nothing fits: what would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from torch import Tensor

from placer.capture import Capture
from placer.cli.main import EXIT_NO_FIT
from placer.cli.output import print_json
from placer.errors import PlacerError
from placer.plan.build import build_plan
from placer.plan.types import Plan
from placer.spec import DeviceSpec, PlacementSpec
from placer.units import format_bytes

_MOST_DEVICES = 8
_MICROBATCHES = (2, 4, 8, 16)


def report_misfit(
    console: Console,
    capture: Capture,
    spec: PlacementSpec,
    inputs: Sequence[Tensor],
    *,
    misfit: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Print what would make the placement fit and leave with the exit code for a misfit.

    ``misfit`` goes to stdout as JSON, with the remedies added.
    """
    with console.status("looking for what would fit …"):
        remedies = find_remedies(capture, spec, inputs)
    console.print("what would make it fit:")
    for remedy in remedies:
        console.print(f"  - {remedy}", markup=False)
    if misfit is not None:
        print_json({**misfit, "remedies": remedies})
    raise typer.Exit(EXIT_NO_FIT)


def find_remedies(capture: Capture, spec: PlacementSpec, inputs: Sequence[Tensor]) -> list[str]:
    """Changes of ``spec`` that were planned and found to fit, the smallest first."""
    found = [*_own_placement(capture, spec, inputs), *_microbatches(capture, spec, inputs)]
    found += _devices(capture, spec, inputs)
    return [*found, _memory(capture, spec, inputs)]


def _own_placement(
    capture: Capture, spec: PlacementSpec, inputs: Sequence[Tensor]
) -> Iterator[str]:
    made = _try(capture, spec.with_layers({}), inputs) if spec.layers else None
    if made is not None and made.fits:
        yield "leave out 'layers': the compiler's own placement fits these devices"


def _microbatches(capture: Capture, spec: PlacementSpec, inputs: Sequence[Tensor]) -> Iterator[str]:
    replicas = spec.replicas if isinstance(spec.replicas, int) else 1
    rows = (capture.call.batch_size or 1) // replicas
    if spec.microbatches == "auto":
        return
    for count in _MICROBATCHES:
        if int(spec.microbatches) < count <= rows:
            made = _try(capture, spec.model_copy(update={"microbatches": count}), inputs)
            if made is not None and made.fits:
                yield f'cut the batch: "microbatches": {count}'
                return


def _devices(capture: Capture, spec: PlacementSpec, inputs: Sequence[Tensor]) -> Iterator[str]:
    devices = list(spec.devices)
    while len(devices) < _MOST_DEVICES:
        devices.append(_next_device(devices))
        wanted = spec.with_layers({}).with_devices(devices)
        made = _try(capture, wanted.model_copy(update={"replica_devices": ()}), inputs)
        if made is not None and made.fits:
            added = ", ".join(d.name for d in devices[len(spec.devices) :])
            more = len(devices) - len(spec.devices)
            like = f" like {spec.devices[-1].name}"
            yield f"add {more} device{'s' * (more > 1)}{like} ({added})" + _without_layers(spec)
            return


def _memory(capture: Capture, spec: PlacementSpec, inputs: Sequence[Tensor]) -> str:
    """The memory that every device would need: with the spec's layers, or without if that helps."""
    wanted = spec.model_copy(update={"objective": "memory"})
    needs = []
    for layers in dict.fromkeys((tuple(spec.layers.items()), ())):
        made = _try(capture, wanted.with_layers(dict(layers)), inputs)
        if made is not None:
            needs.append(max(device.peak + device.reserve for device in made.devices))
    if not needs:
        return "use a smaller input"
    helps = _without_layers(spec) if needs[-1] < 0.95 * needs[0] else ""
    least = needs[-1] if helps else needs[0]
    return f"devices of {format_bytes(least)} (reserve included) each{helps}, or a smaller input"


def _without_layers(spec: PlacementSpec) -> str:
    return " and leave out 'layers'" if spec.layers else ""


def _next_device(devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """A device like the last one, with the first free index of its type."""
    last = devices[-1]
    kind = last.name.partition(":")[0]
    taken = {device.name for device in devices}
    names = (f"{kind}:{index}" for index in range(1, len(devices) + 2))
    return last.model_copy(update={"name": next(n for n in names if n not in taken)})


def _try(capture: Capture, spec: PlacementSpec, inputs: Sequence[Tensor]) -> Plan | None:
    try:
        return build_plan(capture, spec, inputs)
    except PlacerError:
        return None
