"""Derive a device's type (whose kernels it runs) and its default kind from its name."""

from __future__ import annotations

from collections.abc import Iterable

from placer.machine.catalogue import DeviceKind
from placer.machine.kindfile import find_kind

_REFERENCE_KIND = "a100"  # whose rates rank plans where the kind of a device is not known


def device_type(name: str) -> str:
    """The type of the device, whose kernels it runs: "cuda", or "cpu" for all other names.

    >>> device_type("cuda:1"), device_type("cpu:1")
    ('cuda', 'cpu')
    """
    return "cuda" if name.split(":")[0] == "cuda" else "cpu"


def updates_together(devices: Iterable[str]) -> bool:
    """Do torch's optimizers update all parameters of a device at once by default (``foreach``)?

    They do if all trained parameters are on CUDA devices (``_default_to_fused_or_foreach`` of torch.optim,
    2.15). ``devices`` are the names of the devices of these parameters.
    """
    return all(device_type(name) == "cuda" for name in devices)


def is_kind_known(name: str, kind: str | None) -> bool:
    """Whether the kind of a device is given, or it is a CPU, of which the catalogue has one kind."""
    return kind is not None or name.split(":")[0] == "cpu"


def device_kind(name: str, kind: str | None) -> DeviceKind:
    """The device kind ``kind``: a name in the catalogue or a file. If it is None, a kind for reference.

    ``name`` is the name of the device, such as "cuda:0" or "cpu". Raises ``PlacerError`` if the kind is
    unknown or the file is not a device kind.
    """
    return find_kind(kind or ("cpu" if is_kind_known(name, None) else _REFERENCE_KIND))
