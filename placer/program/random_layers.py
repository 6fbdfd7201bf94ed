"""Find the layers of a model that draw random numbers of torch, such as dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from placer._torch import DispatchMode
from placer.operands import tensors_in


@contextmanager
def find_random_layers(module: nn.Module) -> Iterator[list[str]]:
    """In this block, note the innermost layers of ``module`` whose forward draws random numbers.

    The list fills while the block runs: module paths in the order in which they first draw, ``""`` for the
    module's own code. A layer counts if a random operator changed the state of the generator, so a dropout
    in eval mode, or with a probability of 0, does not.
    """
    inside: list[str] = []
    found: dict[str, None] = {}
    names: list[str] = []

    def enter(name: str, *_: Any) -> None:
        inside.append(name)

    def leave(*_: Any) -> None:
        inside.pop()

    def drew() -> None:
        name = inside[-1] if inside else ""
        if name not in found:
            found[name] = None
            names.append(name)

    with ExitStack() as stack:
        for name, layer in module.named_modules():
            for handle in (
                layer.register_forward_pre_hook(partial(enter, name)),
                layer.register_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(_Draws(drew))
        yield names


class _Draws(DispatchMode):
    """Calls ``drew`` after every operator that drew from the default generator of its device."""

    def __init__(self, drew: Any) -> None:
        super().__init__()
        self._drew = drew

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        devices = {t.device for t in tensors_in(args, kwargs)} | {_asked_for(kwargs)}
        before = {device: _state(device) for device in devices}
        result = func(*args, **kwargs)
        if any(not torch.equal(state, _state(device)) for device, state in before.items()):
            self._drew()
        return result


def _asked_for(kwargs: Any) -> torch.device:
    device = kwargs.get("device")
    return torch.device("cpu" if device is None else device)


def _state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
