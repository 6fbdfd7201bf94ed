"""Apply ``--kind`` and ``--profile FILE`` to a spec: its devices get a kind."""

from __future__ import annotations

from pathlib import Path

from placer.errors import PlacerError
from placer.machine.devices import is_kind_known
from placer.machine.kindfile import find_kind, load_kind_file
from placer.planner.devices import device_slot, profile_problem
from placer.planner.unknown_times import unknown_kinds
from placer.program import Program
from placer.spec import PlacementSpec
from placer.spec.fields import device_kind_name


def with_kind_file(spec: PlacementSpec, path: Path | None) -> PlacementSpec:
    """``spec`` with the file as the kind of all devices of the type that was measured.

    Raises ``PlacerError`` if the file is not a device kind, or if the spec has no device of that type.
    """
    if path is None:
        return spec
    wanted = load_kind_file(path).device_type
    devices, found = [], False
    for device in spec.devices:
        if device.name.split(":")[0] == wanted:
            found = True
            memory = device.memory if device.kind is None else device_slot(device, spec).budget
            device = device.model_copy(update={"kind": str(path), "memory": memory})
        devices.append(device)
    if not found:
        names = ", ".join(device.name for device in spec.devices)
        raise PlacerError(
            f"--profile {path}",
            f"was measured on a {wanted!r} device, and the spec has {names}",
            "measure on a device like those",
        )
    return spec.with_devices(devices)


def with_kind(spec: PlacementSpec, kind: str | None) -> PlacementSpec:
    """``spec`` with ``kind`` (as text) for all devices whose kind is not known.

    Raises ``PlacerError`` if there is no such kind, or if the spec says the kind of every device.
    """
    if kind is None:
        return spec
    try:
        name = device_kind_name(kind)
    except ValueError as error:
        raise PlacerError("--kind", str(error)) from None
    if not unknown_kinds(spec):
        remedy = "leave it out, or change the spec"
        raise PlacerError("--kind", "the kinds of all devices in the spec are known", remedy)
    devices = [
        d if is_kind_known(d.name, d.kind) else d.model_copy(update={"kind": name})
        for d in spec.devices
    ]
    return spec.with_devices(devices)


def check_kind_file(path: Path | None, spec: PlacementSpec, program: Program) -> None:
    """Raise ``PlacerError`` if the file is the profile of another model or precision."""
    if path is None:
        return
    wrong = profile_problem(find_kind(str(path)), program.captured.fingerprint, spec.precision)
    if wrong is not None:
        raise PlacerError(f"--profile {path}", *wrong)
