"""Profile a model, and write the measurements to a file, with a description of the measured device."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from placer.api import Example, example_call
from placer.errors import PlacerError
from placer.files import check_writable
from placer.machine.catalogue import DeviceKind
from placer.machine.devices import device_kind
from placer.machine.kindfile import SUFFIX, is_kind_file, kind_to_json, save_kind
from placer.precision import planned_autocast, recorded_under
from placer.profiling.profile import Measured, profile_model
from placer.program import flatten_call, lower
from placer.spec.fields import Precision, device_kind_name, device_name


def profile(
    model: nn.Module,
    args: Example = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: str | Path | None = None,
    device: str | None = None,
    kind: str | None = None,
    precision: Precision = "fp32",
    training: bool = True,
    rounds: int = 5,
) -> Measured:
    """Run steps of ``model`` on a device, and measure the seconds of every node, forward and backward.

    The result is written to ``output``, a file that specs can name as the ``kind`` of a device. ``device``
    is by default the first CUDA device, or the CPU if there is none. ``kind`` is its device kind, used for
    everything that is not measured. ``args`` and ``kwargs`` are the arguments of forward. The model is not
    changed. Raises ``PlacerError`` if the device or the kind does not exist, the model does not run, or the
    file cannot be written.
    """
    if rounds < 1:
        raise PlacerError("rounds", f"{rounds} steps cannot be measured", "measure at least one")
    path = None if output is None else Path(output)
    check_output(path)
    place = device_here(device or "")
    positional, keywords = example_call(model, args, kwargs)
    with recorded_under(planned_autocast(precision)):
        program = lower(model, positional, keywords)
    leaves = flatten_call(program.call, positional, keywords)
    found = profile_model(
        program,
        model,
        leaves,
        base=known_kind(place, kind),
        device=place,
        precision=precision,
        training=training,
        rounds=rounds,
    )
    if path is not None:
        save_kind(file_values(found.kind, place), path)
    return found


def check_output(path: Path | None) -> None:
    """Raise ``PlacerError`` unless a device kind can be written to ``path`` and read from it."""
    if path is not None and not is_kind_file(path.name):
        raise PlacerError(str(path), f"does not end in {SUFFIX}", f"write {path}{SUFFIX}")
    check_writable(path)


def device_here(name: str) -> str:
    """``name`` as a device name; for "", the first CUDA device, or the CPU. Raises ``PlacerError``."""
    if not name:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        return device_name(name)
    except ValueError as error:
        raise PlacerError("--device", str(error)) from None


def known_kind(device: str, kind: str | None) -> DeviceKind:
    """The device kind that measurements are added to. Raises ``PlacerError`` for an unknown ``kind``."""
    try:
        return device_kind(device, None if kind is None else device_kind_name(kind))
    except ValueError as error:
        raise PlacerError("--kind", str(error)) from None


def file_values(kind: DeviceKind, device: str) -> dict[str, Any]:
    """The JSON values of the file for ``kind``, which has just been measured on ``device``."""
    place = torch.device(device)
    called = (
        torch.cuda.get_device_name(place)
        if place.type == "cuda"
        else f"{processor_name()}, {torch.get_num_threads()} threads"
    )
    return kind_to_json(
        kind,
        device=called,
        device_type=place.type,
        torch=torch.__version__,
        measured=datetime.date.today().isoformat(),
    )


def processor_name() -> str:
    """The name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
