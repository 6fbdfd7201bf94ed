"""What the name of a device says: its kind where none is given, and whose kernels it runs."""

from __future__ import annotations

from collections.abc import Iterable

from placer.catalogue import DeviceKind
from placer.kindfile import find_kind

_DEFAULT_KIND = {"cuda": "a100", "cpu": "cpu"}


def device_type(name: str) -> str:
    """Whose kernels run on the device of that name: "cuda" or, for all others, "cpu".

    >>> device_type("cuda:1"), device_type("cpu:1")
    ('cuda', 'cpu')
    """
    return "cuda" if name.split(":")[0] == "cuda" else "cpu"


def updates_together(devices: Iterable[str]) -> bool:
    """Do torch's optimizers by default update all parameters of a device at once?

    They do where all parameters that they train are on CUDA devices (``_default_to_fused_or_foreach``
    of torch.optim, 2.15); else one after the other. ``devices`` are the names of those devices.
    """
    return all(device_type(name) == "cuda" for name in devices)


def device_kind(name: str, kind: str | None) -> DeviceKind:
    """The entry of the catalogue, or the file, called ``kind``; or what a device ``name`` is taken for.

    Raises ``PlacerError`` for a file that describes no kind.
    """
    return find_kind(kind or _DEFAULT_KIND.get(name.split(":")[0], "a100"))
