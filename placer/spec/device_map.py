"""accelerate's ``device_map`` as a spec: an object of module paths and devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from placer.errors import SpecError
from placer.jsonfile import escape_token, spell
from placer.spec.check import Problem
from placer.spec.fields import device_name
from placer.spec.types import PlacementSpec

if TYPE_CHECKING:
    from torch import nn

_OFFLOADED = {
    "cpu": "keeps weights in host memory, and computes on a GPU",
    "disk": "keeps weights on disk",
}


def from_device_map(device_map: Mapping[str, Any], model: nn.Module | None = None) -> PlacementSpec:
    """The spec that puts layers where accelerate's ``device_map`` has them.

    Numbers are CUDA devices, and the key ``""`` is the whole model. Keys of parameters and buffers of
    ``model`` are left out: a spec has layers, and these are where they are read. Raises ``SpecError`` for
    "cpu" beside other devices and for "disk", with which accelerate means something else than a device that
    computes.

    >>> from_device_map({"": 0, "encoder": 1}).layers
    {'**': 'cuda:0', 'encoder': 'cuda:1'}
    """
    problems: list[Problem] = []
    devices: dict[str, str] = {}
    only_cpu = all(str(value) == "cpu" for value in device_map.values())
    if model is not None:
        tensors = {*dict(model.named_parameters()), *dict(model.named_buffers())}
        device_map = {path: value for path, value in device_map.items() if path not in tensors}
    for path, value in device_map.items():
        where = f"/{escape_token(path)}"
        text = str(value)
        number = isinstance(value, int) and not isinstance(value, bool)
        if text in _OFFLOADED and not (only_cpu and text == "cpu"):
            problem = (
                f"with {text!r}, accelerate {_OFFLOADED[text]}; placer computes where weights are"
            )
            remedy = "leave the layer out, so that placer chooses its device, or name a device"
            problems.append((where, problem, remedy))
            continue
        try:
            devices[path] = device_name(f"cuda:{value}" if number else text)
        except ValueError as error:
            problem = str(error) if isinstance(value, str) else f"{spell(value)} is not a device"
            problems.append((where, problem, 'write a number, or a name such as "cuda:1"'))
    if not device_map:
        problems.append(("/", "is empty", 'write an object such as {"encoder": 0, "decoder": 1}'))
    if problems:
        raise SpecError(SpecError.UNNAMED, problems)
    # The most specific path counts in a device_map, and the last one in a spec.
    by_depth = sorted(devices, key=lambda path: len(path.split(".")) if path else 0)
    layers = {path or "**": devices[path] for path in by_depth}
    return PlacementSpec.model_validate({"devices": in_order(devices.values()), "layers": layers})


def in_order(devices: Iterable[str]) -> list[str]:
    """The devices, each once, by type and number.

    >>> in_order(["cuda:10", "cuda:2", "cuda:10"])
    ['cuda:2', 'cuda:10']
    """
    return sorted(
        set(devices), key=lambda name: (name.partition(":")[0], int(name.partition(":")[2] or 0))
    )


def shortest(devices: Mapping[str, str], above: str = "") -> dict[str, str]:
    """The fewest paths that say the same as ``devices``; those inside other ones come later.

    >>> shortest({"a.0": "cuda:0", "a.1": "cuda:0", "b": "cuda:1", "b.x": "cuda:1"})
    {'a': 'cuda:0', 'b': 'cuda:1'}
    """
    if len(set(devices.values())) == 1:
        return {above: next(iter(devices.values()))}
    found = {above: devices[above]} if above in devices else {}
    inside: dict[str, dict[str, str]] = {}
    for path, device in devices.items():
        if path != above:
            part = path.removeprefix(f"{above}." if above else "").partition(".")[0]
            inside.setdefault(f"{above}.{part}" if above else part, {})[path] = device
    for path, group in inside.items():
        found |= shortest(group, path)
    return found
