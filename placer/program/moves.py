"""Handles devices that a model's own code names, as in a model that was split by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from placer.errors import CaptureError

_CPU = torch.device("cpu")


def replace_device(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
    """Replace an accelerator in the arguments of the torch function ``name`` by the CPU.

    Returns the arguments, and the accelerator or None if there is none. ``x.cuda()`` names one without an
    argument.
    """
    place: int | str | None = None
    if kwargs.get("device") is not None:
        place = "device"
    elif name in ("to", "cuda") and len(args) > 1:
        place = 1
    value = kwargs["device"] if place == "device" else args[1] if place == 1 else None
    if name == "cuda" and value is None:
        return args, kwargs, torch.device("cuda")
    device = None if value is None else _accelerator(value)
    if device is None:
        return args, kwargs, None
    if place == "device":
        return args, {**kwargs, "device": _CPU}, device
    return (args[0], _CPU, *args[2:]), kwargs, device


def _accelerator(value: Any) -> torch.device | None:
    """The accelerator that ``value`` names; None if it names no device, the CPU or ``meta``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    if isinstance(value, str):
        try:
            value = torch.device(value)
        except RuntimeError:  # not the name of a device
            return None
    if not isinstance(value, torch.device) or value.type in ("cpu", "meta"):
        return None
    return value


class NamedDevices:
    """The devices that forward names, with the lines.

    Two with an index mean a split by hand, and so does one other than the first, on which inputs come.
    """

    def __init__(self, *, ignored: bool) -> None:
        self.ignored = ignored
        self.error: CaptureError | None = None
        self._lines: dict[torch.device, str] = {}
        self._layer = ""

    def note(self, device: torch.device, layer: str, line: str) -> None:
        """Note that the code of ``layer`` names ``device`` at ``line``.

        Raises ``CaptureError`` for the second device with an index, unless moves are ignored.
        """
        if self.ignored or device.index is None:
            return
        self._lines.setdefault(device, line)
        self._layer = layer
        if len(self._lines) > 1:
            self.refuse()

    def check(self) -> None:
        """Raise ``CaptureError`` at the end of forward, if it names a device other than the first."""
        if self.error is not None:
            raise self.error
        if any(device.index for device in self._lines):
            self.refuse()

    def refuse(self) -> None:
        """Raise ``CaptureError``, which names the devices and the lines."""
        places = " and ".join(f"{where} ({line})" for where, line in self._lines.items())
        self.error = CaptureError(
            self._layer or "the model",
            f"forward itself moves tensors to {places}; in a placed model the plan decides on which device "
            "they are",
            "have these moves ignored: --ignore-device-moves on the command line, ignore_device_moves=True "
            "in Python; or take them out of forward",
        )
        raise self.error


class IgnoreDeviceMoves(TorchFunctionMode):
    """In this context, moves to an accelerator do nothing; new tensors are made on the current device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        args, kwargs, device = replace_device(name, args, dict(kwargs or {}))
        if device is None:
            return func(*args, **kwargs)
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "cuda":
            return tensor
        here = torch.get_default_device() if tensor is None else tensor.device
        if kwargs.get("device") is not None:
            kwargs["device"] = here
        else:
            args = (args[0], here, *args[2:])
        return func(*args, **kwargs)
