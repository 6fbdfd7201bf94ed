"""What was measured on this machine, on its way into a file and from a file into a spec."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from placer.catalogue import DeviceKind
from placer.errors import PlacerError
from placer.kindfile import kind_to_json, load_kind_file
from placer.spec.fields import device_name

if TYPE_CHECKING:
    from placer.spec import PlacementSpec


def device_here(name: str) -> str:
    """The device of that name, or the first CUDA device, or the CPU. Raises ``PlacerError``."""
    if not name:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        return device_name(name)
    except ValueError as error:
        raise PlacerError("--device", str(error)) from None


def kind_values(
    kind: DeviceKind, device: str, *, inputs: Sequence[torch.Tensor] = ()
) -> dict[str, Any]:
    """The content of the file of a kind that was measured now on ``device``."""
    place = torch.device(device)
    called = torch.cuda.get_device_name(place) if place.type == "cuda" else _processor()
    return kind_to_json(
        kind,
        device=called,
        device_type=place.type,
        torch=torch.__version__,
        measured=datetime.date.today().isoformat(),
        inputs=["x".join(map(str, t.shape)) for t in inputs],
    )


def _processor() -> str:
    """The CPU's name and the threads that torch uses."""
    import platform

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = named[0] if named else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def with_kind_file(spec: PlacementSpec, path: Path | None) -> PlacementSpec:
    """``spec`` with the file as the kind of all devices of the type that it was measured on.

    Raises ``PlacerError`` for a file that describes no kind, and where there is no such device.
    """
    from placer.planner.devices import device_slot

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
            str(path),
            f"was measured on a {wanted!r} device, and the spec has {names}",
            "measure on a device like those",
        )
    return spec.with_devices(devices)
