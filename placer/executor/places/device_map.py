"""Maps the devices that a plan names to torch devices of this machine."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from placer.errors import DeviceError
from placer.executor.places.place import Place
from placer.plan.types import Plan


class SimulatedDeviceWarning(UserWarning):
    """This machine lacks the plan's devices, so their stages run on the CPU instead."""


def map_devices(plan: Plan, run_on: str | None = None) -> list[list[list[Place]]]:
    """The place of each shard of each stage of each replica, as ``result[replica][stage][shard]``.

    ``cpu:N`` is always the CPU. If the machine has no device of some type, the CPU stands for it,
    with a ``SimulatedDeviceWarning``. With ``run_on`` all stages run on that device, and there is no
    warning. Raises ``DeviceError`` when the machine has devices of the type but not this one, and
    when it lacks ``run_on``.
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
                f"this machine has no {missing[0].split(':')[0]} device, so the CPU stands for "
                f"{', '.join(missing)}. Pass run_on='cpu' if this is intended.",
                SimulatedDeviceWarning,
                stacklevel=4,
            )
    cpu = torch.device("cpu")
    return [
        [
            [Place(name, found[name] or cpu) for name in plan.devices_of(stage, r)]
            for stage in plan.stages
        ]
        for r in range(plan.replicas)
    ]


def torch_type(name: str) -> str:
    """The type of the device ``name``, such as ``"cuda"``.

    Raises ``DeviceError`` if torch does not know the type or nothing can run on it.
    """
    kind = name.partition(":")[0]
    try:
        torch.device(kind)
    except RuntimeError as error:
        raise DeviceError(f"device {name}", "not a torch device", "use cuda:0, cpu:0, …") from error
    if kind == "meta":
        raise DeviceError(f"device {name}", "nothing can run on meta", "name a real device")
    return kind


def _resolve(name: str) -> torch.device | None:
    """The torch device ``name``; None if this machine has no device of its type."""
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
    """The number of devices of a type, such as ``"cuda"``, on this machine."""
    module: Any = getattr(torch, kind, None)
    return int(module.device_count()) if hasattr(module, "device_count") else 0


def _run_on(name: str) -> torch.device:
    """The device that runs every stage. Raises ``DeviceError`` if this machine lacks it."""
    device = _resolve(name)
    if device is None:
        raise DeviceError("run_on", f"this machine has no {name}", "use 'cpu'")
    return device
