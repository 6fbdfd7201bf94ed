"""Which torch device stands for each device of a plan on this machine."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from placer.errors import DeviceError
from placer.executor.place import Place
from placer.plan.types import Plan


class SimulatedDeviceWarning(UserWarning):
    """The plan's devices are not on this machine: its stages run on the CPU instead."""


def map_devices(plan: Plan, run_on: str | None = None) -> list[list[Place]]:
    """Places per replica and stage.

    ``cpu:N`` is always the CPU. Where the machine has no device of a type at all, the CPU stands
    for it, with a ``SimulatedDeviceWarning``; ``run_on`` says so on purpose and warns of nothing.
    Raises ``DeviceError`` when the machine has that type of device but not that one, or no
    ``run_on``.
    """
    names = dict.fromkeys(name for stage in plan.stages for name in stage.devices)
    found: dict[str, torch.device | None]
    if run_on is not None:
        found = dict.fromkeys(names, _run_on(run_on))
    else:
        found = {name: _resolve(name) for name in names}
        missing = [name for name, device in found.items() if device is None]
        if missing:
            warnings.warn(
                f"this machine has no {missing[0].split(':')[0]} device: the CPU stands for "
                f"{', '.join(missing)}. Pass run_on='cpu' to say so on purpose.",
                SimulatedDeviceWarning,
                stacklevel=4,
            )
    cpu = torch.device("cpu")
    return [
        [Place(stage.devices[r], found[stage.devices[r]] or cpu) for stage in plan.stages]
        for r in range(plan.replicas)
    ]


def torch_type(name: str) -> str:
    """The type of the device called ``name``. Raises ``DeviceError`` where nothing can run on it."""
    kind = name.partition(":")[0]
    try:
        torch.device(kind)
    except RuntimeError as error:
        raise DeviceError(f"device {name}", "not a torch device", "use cuda:0, cpu:0, …") from error
    if kind == "meta":
        raise DeviceError(f"device {name}", "nothing can run on meta", "name a real device")
    return kind


def _resolve(name: str) -> torch.device | None:
    """The torch device called ``name``; None where the machine has none of its type."""
    kind, number = torch_type(name), name.partition(":")[2]
    if kind == "cpu":
        return torch.device("cpu")
    count = device_count(kind)
    if count == 0:
        return None
    index = int(number) if number.isdecimal() else 0  # torch.device wraps around above 127
    if index >= count:
        have = ", ".join(f"{kind}:{i}" for i in range(count))
        raise DeviceError(
            f"device {name}",
            f"this machine has only {have}",
            "name one of them, or pass run_on='cpu' to try the placement without its devices",
        )
    return torch.device(kind, index)


def device_count(kind: str) -> int:
    """How many devices of a type, such as ``"cuda"``, this machine has."""
    module: Any = getattr(torch, kind, None)
    return int(module.device_count()) if hasattr(module, "device_count") else 0


def _run_on(name: str) -> torch.device:
    """The one device that runs every stage. Raises ``DeviceError`` when it is not here."""
    device = _resolve(name)
    if device is None:
        raise DeviceError("run_on", f"this machine has no {name}", "use 'cpu'")
    return device
